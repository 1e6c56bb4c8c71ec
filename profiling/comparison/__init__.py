"""Parts of `compare.py`: its options, the arms, the loop over them with its journal, the gates and the report."""

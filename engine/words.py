"""The words that options may be, as a type checker sees them. Imports nothing of this project."""

from __future__ import annotations

from typing import Literal

Model = Literal["tiny", "4b", "9b", "27b"]
Dtype = Literal["auto", "bfloat16", "float32"]
Split = Literal["exact", "aligned"]
Gemm = Literal["auto", "default", "fixed", "tuned"]
Schedule = Literal["auto", "independent", "batched", "levels", "tree"]
Pack = Literal["all", "one"]
Graphs = Literal["auto", "eager", "compiled", "captured"]
Capture = Literal["answer", "load", "idle"]
HeadName = Literal["auto", "scalar", "yes_minus_no", "letters"]
Lora = Literal["merged", "unmerged"]
Reading = Literal["plain", "special"]
Format = Literal["text", "json"]
Shown = Literal["auto", "json", "table", "both"]
WarmUp = list[int] | Literal["all"]

"""Options as Hydra reads them, example requests, and winners of products that ship. Data only."""

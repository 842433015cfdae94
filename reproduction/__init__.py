"""The experiments of the paper "Pruning by explaining": `python -m reproduction`. Not part of the installed package."""

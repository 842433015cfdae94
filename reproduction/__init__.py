"""The paper's experiments, one package each."""

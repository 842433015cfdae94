"""The paper's toy experiments, with every table and figure."""

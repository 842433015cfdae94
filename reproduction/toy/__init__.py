"""The paper's toy experiments: every table and figure, beside the paper's numbers."""

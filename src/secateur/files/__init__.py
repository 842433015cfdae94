"""Saved models, fingerprints, ONNX."""

"""Files: saved models, fingerprints, ONNX."""

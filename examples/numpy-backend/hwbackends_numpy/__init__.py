"""hwbackends plugin that computes with NumPy on CPU tensors."""

"""Grouped SwiGLU experts for mixture-of-experts models, one API over several kernel back-ends."""

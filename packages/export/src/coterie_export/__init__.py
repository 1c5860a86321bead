"""Convert hybrid mixture-of-experts checkpoints to Hugging Face formats and back, with every tensor accounted for."""

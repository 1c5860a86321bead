"""Train mixture-of-experts language models, from a laptop to a cluster."""

"""Expert and data parallelism for mixture-of-experts training: mesh, dispatchers, gradients, optimizer."""

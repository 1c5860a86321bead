"""Mixture-of-experts routers, load statistics and balance losses that hold in every layout."""

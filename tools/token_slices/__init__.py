"""`python -m alpa.tools.token_slices`: TeraPipe's published latencies against a model of them."""

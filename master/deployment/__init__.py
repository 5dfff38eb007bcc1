"""Plans of which node holds which weights, and deployments made from them."""

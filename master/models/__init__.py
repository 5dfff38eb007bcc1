"""Download of models, and a list of recommended models with their speed on the user's machines."""

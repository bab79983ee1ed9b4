"""What a model is: the shape read from an HF `config.json`, and the parameter map of each family."""

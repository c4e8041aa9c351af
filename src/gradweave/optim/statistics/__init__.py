"""Statistics of layers' inputs and outputs, collected while a model trains."""

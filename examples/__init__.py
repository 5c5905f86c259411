"""Examples: programs and configs that are run from the repository's root."""

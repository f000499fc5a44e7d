"""What all fault tests have in common."""

from tests.recipes.warm import trained as undisturbed

__all__ = ["undisturbed"]

"""Settings of every test."""

from hypothesis import settings

# Examples take as long as the machine lets them: what must be fast has a test of its own, in CPU seconds.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

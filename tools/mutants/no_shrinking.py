"""A pytest plugin for runs under a mutant: one failing example is enough, no least is sought."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants", phases=(Phase.explicit, Phase.generate), deadline=None, derandomize=True
)
settings.load_profile("mutants")

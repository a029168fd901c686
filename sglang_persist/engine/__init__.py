"""The only modules that import sglang and torch. A new SGLang release changes these alone."""

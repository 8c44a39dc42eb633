"""ffnlab: which feed-forward block should my Transformer have?"""

__version__ = "0.1.0"

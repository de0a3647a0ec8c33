"""Answers that must have a shape: from what a request asks to the tokens that may come next."""

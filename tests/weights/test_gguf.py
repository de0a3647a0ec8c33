"""GGUF files as Hugging Face checkpoints: names, order of rows, formats, the config, and damaged files."""

import time

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Format
from gguf import GGUFReader, quants

from jaxserve.weights import demo
from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.blocks import dequantize
from jaxserve.weights.readers.gguf import GgufCheckpoint, read_metadata

from . import gguf_files as files

"""Which model lies in a folder: by its content, whatever the path."""

from __future__ import annotations

import hashlib
from pathlib import Path

from spmd_rl.config.errors import UserError

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14  # of a file of weights
_OF_TEXT = {".json", ".jinja", ".txt", ".model", ".tiktoken"}  # configuration, tokenizer, template


def weights_identity(path: str) -> str:
    """A digest of config.json, and of names, sizes and samples of the weight files.

    A few MiB are read, however large the model. An adapter means nothing beside another base.
    """
    folder = Path(path)
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(index * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_identity(path: str) -> str:
    """The same of all that a run reads there: also of the tokenizer and its chat template. Raises UserError."""
    try:
        digest = hashlib.blake2b(weights_identity(path).encode(), digest_size=16)
        for file in sorted(file for file in Path(path).iterdir() if file.suffix in _OF_TEXT and file.is_file()):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(file.read_bytes())
    except OSError as error:
        raise UserError(f"model.path={path} can't be read: {error.strerror}: {error.filename}") from None
    return digest.hexdigest()

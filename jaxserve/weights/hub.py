"""Downloads from the Hugging Face hub, and says what to do when that fails.

The only file that imports huggingface_hub, so that a local model starts without it. Token, cache and offline mode are
the hub's own environment variables: HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

TOKENIZER = (
    "config.json",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/*",
)
MODEL = (*TOKENIZER, "generation_config.json", "*.safetensors", "*.safetensors.index.json")
IGNORED = ("consolidated*", "original/*", "adapter*")


def download(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The local directory of a repository's snapshot, with the files that match; from the cache if it is there.

    Raises:
        ValueError: no such repository or revision, no access, or not reachable; says what to do.
    """
    at = f"{repository} (revision {revision})" if revision else repository
    try:
        path = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(IGNORED)
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"model {at} is gated: accept its licence at https://huggingface.co/{repository}, "
            "then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"revision {revision!r} does not exist in {repository} on Hugging Face") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"model {at} does not exist on Hugging Face, or is private: check the name, or set HF_TOKEN"
        ) from None
    except errors.HFValidationError:
        raise ValueError(
            f"model {repository!r} is neither a file or directory here nor a Hugging Face id such as org/name"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as e:
        raise ValueError(
            f"model {at} is not in the cache and Hugging Face cannot be reached: check the connection, unset "
            f"HF_HUB_OFFLINE, or give a local directory ({_first_line(e)})"
        ) from None
    except errors.HfHubHTTPError as e:
        raise ValueError(f"cannot download model {at} from Hugging Face: {_first_line(e)}") from None
    except OSError as e:
        raise ValueError(f"cannot store model {at}: {e}; HF_HUB_CACHE says where it goes") from None
    return Path(path)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""Checkpoints that are fetched from the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from worker.checkpoint.source import Progress
from worker.models.config import ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja"]
# Weights that some repositories hold a second time in another form.
_UNWANTED = ["original/*", "consolidated*", "onnx/*"]


def fetch_from_hub(repository: str, progress: Progress) -> Path:
    """The folder of a repository `owner/name`, downloaded where it is not cached yet.

    Raises ModelError, which says what to do where there is no network.
    """
    progress(f"fetching {repository} from the Hugging Face hub")
    try:
        return Path(
            snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its licence on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{repository} is neither a local path nor a repository of the hub"
            " (a private one needs HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the local cache and the hub cannot be reached; "
            "give a local folder or GGUF file, or smollm2-135m-instruct, which needs no network"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"fetching {repository} from the hub failed: {error}") from error

"""Owns what is known of the model hub before it is asked: whether it answers, and what is here.

Must never change a setting of the hub's library. The surprising fact: without a network that
library asks again for half a minute, and then says that the repository has no such file.
"""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from .errors import InputError

__all__ = ["hub_arguments", "is_on_disk"]

_PATIENCE = 5.0


def is_on_disk(place: str) -> bool:
    """Whether `place` is a file or folder, and no hub is needed."""
    return Path(place).exists()


def hub_arguments(option: str, place: str, *, role: str = "") -> dict[str, bool]:
    """What diffusers' loaders are to be told about `place`, a path or a hub id.

    Where the hub does not answer, only what was downloaded before is used; where there is nothing,
    `InputError` says so at once. `role` is what the place is for, where the user did not name it.
    """
    if is_on_disk(place):
        return {}
    why = _out_of_reach()
    if why is None:
        return {}
    owner_and_name = "/".join(place.split("/")[:2])
    folder = repo_folder_name(repo_id=owner_and_name, repo_type="model")
    if (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir():
        return {"local_files_only": True}
    raise InputError(
        option,
        f"{role}{owner_and_name!r}{', which' if role else ''} is no folder here and was not "
        f"downloaded before, and {why}",
    )


def _out_of_reach() -> str | None:
    """Why the hub cannot be asked, or None where it may answer."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE forbids to ask the hub"
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    if urllib.request.getproxies().get(address.scheme) and not urllib.request.proxy_bypass(host):
        return None  # the proxy knows the way
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"the hub at {host} cannot be reached: {error.strerror or error}"
    return None

"""Where a command writes a new directory: beside the place first, and renamed to it when it is whole."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_asyncrl.data.errors import UserError


def check_free(out: Path) -> None:
    """Make the folder that `out` will stand in, and see that a directory can get the name `out` there.

    Raises:
        UserError: something is there but an empty directory, which a link, the working directory and a mount are not
            either; or the folder cannot be made or written.
    """
    another = "choose another place"
    try:
        if out.is_symlink():
            raise UserError(f"{out} is a symbolic link; {another}")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an empty directory; {another}")
        if out.exists() and (out.samefile(Path.cwd()) or out.is_mount()):
            raise UserError(f"{out} cannot be replaced by the directory that is made: name one that does not exist yet")
        out.parent.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell all: read-only file systems, /proc.
        Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.try-")).rmdir()
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.filename or out}: {error.strerror}; {another}") from None

"""Makes the name "echo" known to torch.distributed; both entry point groups of pyproject.toml call `register`.

torch runs this at the end of `import torch`, where an exception would break every torch program of the environment. So
nothing here loads the extension or touches a device, and whatever goes wrong is a warning.
"""

import warnings
from typing import Any

NAME = "echo"


def register() -> None:
    """Register the backend, and the aliases that ECHO_REPLACE asks for. May be called any number of times; never
    raises."""
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if NAME.upper() not in dist.Backend._plugins:
            # A list, because torch up to 2.13 walks a plain string letter by letter.
            dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices())
        from . import alias, options

        if not options.is_off():
            alias.install(options.replaced_backends())
    except Exception as error:
        warnings.warn(f"the backend 'echo' could not be registered: {error!r}", stacklevel=2)


def devices() -> list[str]:
    """Device types the backend is registered for: by how torch was built, since asking the driver would break later
    forks."""
    import torch

    return ["cpu", "cuda"] if torch.version.cuda or torch.version.hip else ["cpu"]


def create(dist_options: Any, pg_options: Any) -> Any:
    """What torch calls at the creation of a group; all that is heavy is imported only here."""
    from . import creation

    return creation.create_group(dist_options, pg_options)

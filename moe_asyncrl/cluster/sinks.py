"""The sinks that a recipe asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.sinks.feed import Feeds, FeedThread, Sink, plain


def check_sinks(recipe: Recipe) -> None:
    """Raise `UserError` for a sink whose library is not there. Nothing is imported."""
    t = recipe.telemetry
    for field, library, wanted in (
        ("tensorboard", "tensorboard", t.tensorboard),
        ("wandb", "wandb", t.wandb is not None),
        ("mlflow", "mlflow", t.mlflow is not None),
    ):
        if wanted and importlib.util.find_spec(library) is None:
            off = "false" if field == "tensorboard" else "null"
            raise UserError(
                f"telemetry.{field}: the package {library} is not installed; "
                f"install it (pip install {library}) or set telemetry.{field}={off}"
            )


def start_sinks(folder: RunFolder, recipe: Recipe) -> Feeds:
    """Start feeding what the recipe asks for. Close the result at the end of the run."""
    return Feeds([FeedThread(folder, name, make) for name, make in _wanted(folder, recipe).items()])


def _wanted(folder: RunFolder, recipe: Recipe) -> dict[str, Callable[[], Sink]]:
    t = recipe.telemetry

    def tensorboard() -> Sink:
        from moe_asyncrl.telemetry.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(folder.tensorboard)

    def wandb() -> Sink:
        from moe_asyncrl.telemetry.sinks.wandb import WandbSink

        return WandbSink(folder.path, t.wandb or "", plain(recipe))

    def mlflow() -> Sink:
        from moe_asyncrl.telemetry.sinks.mlflow import MlflowSink

        return MlflowSink(t.mlflow or "", recipe.run.name, folder.path.name)

    sinks: dict[str, Callable[[], Sink]] = {}
    if t.tensorboard:
        sinks["tensorboard"] = tensorboard
    if t.wandb is not None:
        sinks["wandb"] = wandb
    if t.mlflow is not None:
        sinks["mlflow"] = mlflow
    return sinks

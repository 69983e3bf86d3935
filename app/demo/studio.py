"""Owns the one loaded model of a demo: its pipelines, graphs, LoRA weights, files and line.

Must never know the page. The surprising fact: only the worker thread of the line touches a
pipeline, also for reading counters, so everything the page shows is a copy made between two jobs.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

import dit_graphs
from dit_graphs import GraphConfig, GraphError
from dit_graphs.cache import Entry, GraphCache
from dit_graphs.memory import device_state
from dit_graphs.pipelines import stats
from dit_graphs.pipelines.acceleration import Acceleration, acceleration_of
from dit_graphs.pipelines.generate import BUNDLED, Adapter, InputError, Json, LoadedPipeline
from dit_graphs.pipelines.generate.serving import partner_of
from dit_graphs.pipelines.generate.setup import set_up

from . import films
from .form import Limits
from .jobs import JobQueue
from .loras import LoraShelf
from .modes import Mode, ModePlan, plans_of
from .preview import Previewer
from .rewriting import can_rewrite
from .telling_apart import told_apart

__all__ = ["KEPT_SECONDS", "GraphSnapshot", "Studio"]

log = logging.getLogger("dit_graphs.demo")
# A stop waits for the step at work, and so does everybody in the line: at 2048 × 2048 one step of a
# small model takes minutes on a CPU.
_CPU_SIDE = 1024
KEPT_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class GraphSnapshot:
    """What the graphs hold and did until now: `stats()`, `explain()`, and the budget in bytes."""

    stats: dict[str, object] = field(default_factory=dict)
    explanation: str = ""
    held_bytes: int = 0
    budget_bytes: int | None = None


class Studio:
    """A loaded, accelerated model that serves one job at a time."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        graphs: GraphConfig,
        *,
        name: str | None = None,
        output: Path | None = None,
        lora_dir: Path | None = None,
        limits: Limits | None = None,
        max_waiting: int = 16,
    ) -> None:
        self.graphs = graphs
        self.name = name
        is_slow = loaded.device.type == "cpu"
        self.limits = limits or (Limits(side=_CPU_SIDE) if is_slow else Limits())
        self.plans = plans_of(type(loaded.pipe))
        loaded.pipe.set_progress_bar_config(disable=True)  # the page shows the steps
        self.loras = LoraShelf(loaded.spec.lora, lora_dir)
        self.queue = JobQueue(max_waiting=max_waiting)
        self.previewer = Previewer()
        self.can_rewrite = can_rewrite(loaded.pipe)
        self.shown = Path(tempfile.mkdtemp(prefix="dit-graphs-demo-"))
        self.output = output or self.shown
        self.device = loaded.device
        self._loaded = {type(loaded.pipe): loaded}
        self._main = loaded
        self._adapters = loaded.spec.lora
        self.snapshot = GraphSnapshot()
        self.refresh()

    @property
    def pipe(self) -> DiffusionPipeline:
        """The pipeline the model was loaded as."""
        return self._main.pipe

    @property
    def model_name(self) -> str:
        """The model as records call it."""
        return self.name or str(self.model_settings["model"])

    @property
    def model_settings(self) -> Mapping[str, Json]:
        """How the model was loaded, as records note it."""
        return self._main.spec.to_mapping()

    @property
    def model_words(self) -> str:
        """The model as a reader knows it."""
        if self.name == BUNDLED:
            return "the bundled model"
        place = self.model_name.rstrip("/")
        return place if place.count("/") == 1 else place.rpartition("/")[2]

    @property
    def defaults(self) -> dict[str, object]:
        """The call arguments the model folder asks for."""
        return dict(self._main.defaults)

    @property
    def start_adapters(self) -> tuple[Adapter, ...]:
        """The LoRA weights the demo was started with."""
        return self._main.spec.lora

    def plan(self, mode: Mode) -> ModePlan:
        """The plan of `mode`. Raises `InputError` where the model cannot do it."""
        for plan in self.plans:
            if plan.mode is mode:
                return plan
        able = ", ".join(plan.mode.title.lower() for plan in self.plans)
        raise InputError("mode", f"this model can do {able}")

    def pipeline_for(self, plan: ModePlan) -> LoadedPipeline:
        """The pipeline that serves `plan`, sharing the loaded components; made on first use."""
        found = self._loaded.get(plan.pipeline_class)
        if found is None:
            found = partner_of(self._main, plan.pipeline_class)
            self._loaded[plan.pipeline_class] = found
        return replace(found, spec=replace(found.spec, lora=self._adapters))

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Exactly these LoRA weights act from now on; whatever is raised, none act then.

        Other strengths of the same files are set in place; other files are loaded. Raises
        `InputError`.
        """
        if adapters == self._adapters:
            return
        try:
            if [a.path for a in adapters] == [a.path for a in self._adapters]:
                names = [f"lora_{index}" for index in range(len(adapters))]
                self.pipe.set_adapters(names, [adapter.scale for adapter in adapters])
            else:
                if self._adapters:
                    self._unload_adapters()
                if adapters:
                    set_up(self.pipe, replace(self._main.spec, lora=adapters), self.device)
        except BaseException:  # half of them would act on every later picture, and no record say so
            self._unload_adapters()
            raise
        self._adapters = adapters

    def _unload_adapters(self) -> None:
        self._adapters = ()
        if self.takes_lora and importlib.util.find_spec("peft") is not None:
            self.pipe.unload_lora_weights()

    def publish(self, path: Path, record: Mapping[str, Json] | None = None) -> Path:
        """A file's copy where the web server may read it: the page never gets the output folder.

        A film's copy carries `record`, as a picture does by itself. Copies of yesterday go.
        """
        _remove_old(self.shown)
        is_film = record is not None and path.suffix == films.SUFFIX
        if self.output == self.shown and not is_film:
            return path
        folder = self.shown / "films" if is_film else self.shown
        folder.mkdir(exist_ok=True)
        copy = folder / path.name
        half = folder / f".{path.name}"  # a full disk must not leave half a file to be shown
        shutil.copyfile(path, half)
        if is_film and record is not None:
            films.stamp(half, record)
        return half.replace(copy)

    @property
    def backend(self) -> str:
        """What serves the denoiser: a backend, "none" without CUDA, or "off"."""
        reports = self.snapshot.stats.get("components")
        report = reports.get("denoiser") if isinstance(reports, dict) else None
        return str(report.get("backend")) if isinstance(report, dict) else "off"

    @property
    def takes_lora(self) -> bool:
        """Whether LoRA weights can be loaded into the pipeline."""
        return hasattr(self.pipe, "load_lora_weights")

    @property
    def is_video(self) -> bool:
        """Whether the model makes videos."""
        return self.plans[0].mode is Mode.VIDEO

    def refresh(self) -> GraphSnapshot:
        """Reads what the graphs hold now. Only between jobs, or from the worker itself."""
        acceleration = acceleration_of(self.pipe)
        if acceleration is None:
            self.snapshot = GraphSnapshot()
            return self.snapshot
        numbers = stats(self.pipe)
        _tell_apart(numbers, acceleration)
        self.snapshot = GraphSnapshot(
            stats=numbers,
            explanation=dit_graphs.explain(self.pipe),
            held_bytes=_held_bytes(numbers),
            budget_bytes=self._budget(acceleration.config),
        )
        return self.snapshot

    def _budget(self, config: GraphConfig) -> int | None:
        budget = config.budget_for("denoiser")
        if budget != "auto":
            return int(budget)
        if self.device.type != "cuda":
            return None
        return device_state(self.device).default_budget()

    def recover_from_out_of_memory(self) -> None:
        """Freed blocks go back to the device, so that a smaller request finds them."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """The line is closed, the page's own files are gone; an output folder keeps its files."""
        self.queue.close()
        try:
            self.refresh()
        except GraphError:  # already restored by the caller
            log.debug("the pipeline is not accelerated any more")
        shutil.rmtree(self.shown, ignore_errors=True)


def _remove_old(folder: Path) -> None:
    """A server that runs for months keeps no file longer than a page can show it."""
    oldest = time.time() - KEPT_SECONDS
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def _tell_apart(numbers: dict[str, object], acceleration: Acceleration) -> None:
    """No two signatures of one component have the same name in `numbers` afterwards."""
    components = numbers.get("components")
    assert isinstance(components, dict)
    for label, report in components.items():
        graphs = report.get("graphs") or []
        cache = getattr(acceleration.runners.get(label), "cache", None)
        # a decode keeps slots, and the names of its graphs differ
        held = cache.held() if isinstance(cache, GraphCache) else []

        def differ(first: int, other: int, held: Sequence[Entry] = held) -> list[str]:
            if max(first, other) >= len(held):
                return []
            return held[first].signature.diff(held[other].signature)

        names = told_apart([str(graph["signature"]) for graph in graphs], differ)
        for graph, name in zip(graphs, names, strict=True):
            graph["signature"] = name


def _held_bytes(numbers: dict[str, object]) -> int:
    """Bytes all graphs hold: the shared pool where there is one, else their own buffers."""
    components = numbers.get("components")
    assert isinstance(components, dict)
    pools = [int(report.get("pool_bytes") or 0) for report in components.values()]
    own = sum(
        int(graph.get("nbytes") or 0)
        for report in components.values()
        for graph in report.get("graphs", [])
    )
    return max(pools, default=0) or own

"""Settings of one process: file < environment < flags, each value with its origin.

    file         YAML: every key of `Settings`, `clusters:`, `mounts:`, `datasets:` (lists), and `controller:` and
                 `placement:` (mappings)
    environment  FUSECACHE_<KEY> for keys of `Settings` and of a cluster (FUSECACHE_USER, FUSECACHE_TLS_CA_FILE ...),
                 FUSECACHE_CONTROLLER_<KEY> and FUSECACHE_PLACEMENT_<KEY> for those of the two mappings
    flags        --key-with-dashes, given here as key -> text

`load` reads and checks everything; `Configuration.plan` makes the `MountPlan` of one mount. Each error is one
line: where, the key, the value, what is allowed. Nothing here touches the network or a mount point.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fusecache.config.co_scheduling import ControllerLink, PlacementConfig
from fusecache.config.settings import (
    ClusterConfig,
    DatasetConfig,
    MountConfig,
    MountedDataset,
    MountPlan,
    Settings,
)
from fusecache.config.source import (
    AlluxioSource,
    ClusterSource,
    FolderSource,
    absolute,
    check_folder,
    parse_source,
)
from fusecache.config.units import value_with_unit
from fusecache.errors import UsageError

PREFIX = "FUSECACHE_"
CONFIG_VARIABLE = "FUSECACHE_CONFIG"
"""Environment variable that names the file when --config does not."""

CLUSTER_KEYS: tuple[str, ...] = tuple(key for key in ClusterConfig.model_fields if key not in ("name", "masters"))
"""Keys of a cluster that flags and variables may give too."""

_SINGULAR = {"tier_folders": "--tier-folder", "node_hosts": "--node-host"}
"""Flags given several times are named for one of their values."""

_SECTIONS = ("clusters", "mounts", "datasets", "controller", "placement")
_MAPPINGS: Mapping[str, type[BaseModel]] = {"controller": ControllerLink, "placement": PlacementConfig}
_MAPPING_KEYS: Mapping[str, tuple[str, str]] = {
    f"{section}_{key}": (section, key) for section, model in _MAPPINGS.items() for key in model.model_fields
}
"""Variable without its prefix, in small letters -> (section, key)."""
_LIST_KEYS = ("tier_folders", "node_hosts")

# A Kubernetes service named `fusecache` puts these into every pod of its namespace: not ours, not typing errors.
# FUSECACHE_TEST_* belongs to the tests.
_FOREIGN_VARIABLE = re.compile(
    r"FUSECACHE_(TEST_.*|(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT(_[0-9]+_(TCP|UDP|SCTP)(_.*)?)?)"
)

_MUST_BE = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    "dict_type": "a mapping of names to numbers",
    "string_type": "a text",
    "path_type": "a path",
    "too_short": "a list of at least one",
    "string_too_short": "a text that is not empty",
}
"""pydantic's kinds of errors, by what they ask for."""
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_LAYERS = {"--{}": "flags", PREFIX + "{}": "environment"}
"""What an error is blamed on that several keys make together."""

Model = TypeVar("Model", bound=BaseModel)
Origins = dict[str, str]


@dataclass(frozen=True)
class Configuration:
    """What file, environment and flags say together."""

    file: Path | None
    settings: Settings
    """Of the process, or of a mount that overrides nothing."""
    origins: Origins
    """Settings key -> `default`, the file, the variable or the flag."""
    clusters: Mapping[str, ClusterConfig]
    mounts: tuple[MountConfig, ...]
    datasets: tuple[DatasetConfig, ...]
    layers: tuple[tuple[str, Mapping[str, Any]], ...]
    """Settings by origin, weakest first; the origin holds `{}` where the key's own name goes."""
    cluster_layers: tuple[tuple[str, Mapping[str, Any]], ...]
    """Cluster keys by origin, from environment and flags."""
    controller: ControllerLink | None = None
    """Where to report; None = nowhere."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """How the controller works."""

    def settings_of(self, mount: MountConfig) -> tuple[Settings, Origins]:
        """Settings of one entry of `mounts:`, which stand above the file's and below the environment's."""
        where = f"{self.file}: mount {mount.mountpoint}"
        return _merge((self.layers[0], (where, mount.overrides), *self.layers[1:]))

    def plan_of(self, mount: MountConfig) -> MountPlan:
        """The plan of one entry of `mounts:`. UsageError when its source can't be used."""
        try:
            return self._plan(mount.source, mount.mountpoint, self.settings_of(mount)[0])
        except UsageError as wrong:
            raise UsageError(f"{self.file}: mount {mount.mountpoint}: {wrong}") from None

    def plan(self, source_text: str, mountpoint: Path) -> MountPlan:
        """The plan of a mount from the command line. UsageError when the source can't be used."""
        return self._plan(source_text, Path(absolute(mountpoint)), self.settings)

    def resolve(self, source_text: str) -> tuple[ClusterConfig | None, Path | None, bytes]:
        """(cluster, folder, Alluxio path) of a SOURCE: cluster or folder is None. UsageError when it can't be used."""
        source = parse_source(source_text)
        match source:
            case FolderSource(folder):
                check_folder(folder)
                for origin, values in self.cluster_layers:
                    if values and origin.startswith("--"):
                        raise UsageError(
                            f"{flag_name(next(iter(values)))} is for a cluster, and SOURCE {source_text!r} is a folder"
                        )
                return None, folder, b"/"
            case ClusterSource(name, path):
                if name not in self.clusters:
                    raise UsageError(f"SOURCE {source_text!r}: " + _unknown_cluster(name, self.clusters, self.file))
                return self._cluster(self.clusters[name]), None, path
            case AlluxioSource(masters, path):
                for known in self.clusters.values():
                    if set(known.masters) == set(masters):
                        return self._cluster(known), None, path
                return self._cluster(ClusterConfig(name="cluster", masters=masters)), None, path

    def _cluster(self, base: ClusterConfig) -> ClusterConfig:
        values: dict[str, Any] = base.model_dump(exclude_unset=True)
        origin = str(self.file)
        for origin_form, layer in self.cluster_layers:
            for key, value in layer.items():
                values[key] = _split_list(value) if key in _LIST_KEYS else value
                origin = origin_form
        return _validated(ClusterConfig, values, origin)

    def _plan(self, source_text: str, mountpoint: Path, settings: Settings) -> MountPlan:
        cluster, folder, path = self.resolve(source_text)
        datasets = []
        for dataset in self.datasets if cluster else ():
            source = parse_source(dataset.path)
            assert isinstance(source, ClusterSource)  # load() refuses anything else
            same_cluster = cluster is not None and set(self.clusters[source.cluster].masters) == set(cluster.masters)
            if same_cluster and (_within(source.path, path) or _within(path, source.path)):
                datasets.append(
                    MountedDataset(
                        name=dataset.name, path=source.path, immutable=dataset.immutable, refresh_s=dataset.refresh_s
                    )
                )
        return MountPlan(
            cluster=cluster,
            folder=folder,
            path=path,
            mountpoint=mountpoint,
            settings=settings,
            datasets=tuple(datasets),
        )


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Configuration:
    """Read and check everything. `flags` maps keys of `Settings` and of a cluster to what was typed.

    UsageError names the file, variable or flag, the key, the value and what is allowed.
    """
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    document = _read(file) if file else {}
    where = str(file)
    _refuse_unknown(document, (*Settings.model_fields, *_SECTIONS), where)
    clusters = _clusters(document.get("clusters"), where)
    mounts = _mounts(document.get("mounts"), where)
    datasets = _entries(DatasetConfig, document.get("datasets"), f"{where}: datasets", "name")
    for dataset in datasets:
        source = parse_source(dataset.path)
        if not isinstance(source, ClusterSource):
            raise UsageError(f"{where}: datasets: path {dataset.path!r} is not CLUSTER:/PATH")
        if source.cluster not in clusters:
            raise UsageError(
                f"{where}: datasets: path {dataset.path!r}: " + _unknown_cluster(source.cluster, clusters, file)
            )

    variables = _variables(environment)
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (where, {key: value for key, value in document.items() if key in Settings.model_fields}),
        (PREFIX + "{}", {key: value for key, value in variables.items() if key in Settings.model_fields}),
        ("--{}", {key: value for key, value in flags.items() if key in Settings.model_fields}),
    )
    cluster_layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (PREFIX + "{}", {key: value for key, value in variables.items() if key in CLUSTER_KEYS}),
        ("--{}", {key: value for key, value in flags.items() if key in CLUSTER_KEYS}),
    )
    settings, origins = _merge(layers)
    configuration = Configuration(
        file,
        settings,
        origins,
        clusters,
        mounts,
        datasets,
        layers,
        cluster_layers,
        controller=_mapping(ControllerLink, "controller", document, variables, where),
        placement=_mapping(PlacementConfig, "placement", document, variables, where) or PlacementConfig(),
    )
    for mount in mounts:
        configuration.settings_of(mount)  # a wrong override is an error now, not when the mount starts
        source_of_mount = parse_source(mount.source)
        if isinstance(source_of_mount, ClusterSource) and source_of_mount.cluster not in clusters:
            raise UsageError(
                f"{where}: mounts: source {mount.source!r}: "
                + _unknown_cluster(source_of_mount.cluster, clusters, file)
            )
    return configuration


def flag_name(key: str) -> str:
    """The flag of a key: `refresh_s` -> `--refresh-s`."""
    return _SINGULAR.get(key, "--" + key.replace("_", "-"))


def _merge(layers: tuple[tuple[str, Mapping[str, Any]], ...]) -> tuple[Settings, Origins]:
    """One Settings from all layers, later ones winning; each layer is checked, also where it is overridden."""
    values: dict[str, Any] = {}
    origins: Origins = dict.fromkeys(Settings.model_fields, "default")
    for origin, layer in layers:
        given = {key: _from_file(key, value) if not _by_key(origin) else value for key, value in layer.items()}
        _validated(Settings, given, origin)
        values.update(given)
        origins.update({key: _origin_text(origin, key) for key in given})
    return Settings(**values), origins


def _by_key(origin: str) -> bool:
    return "{}" in origin


def _origin_text(origin: str, key: str) -> str:
    """`--{}` -> `--refresh-s`, `FUSECACHE_{}` -> `FUSECACHE_REFRESH_S`, a file's name stays."""
    if not _by_key(origin):
        return origin
    return flag_name(key) if origin.startswith("--") else origin.format(key.upper())


def _from_file(key: str, value: Any) -> Any:
    """YAML's `mode_mask: 555` means octal, as chmod's does: give the digits, not the number, to the parser."""
    if key == "mode_mask" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _validated(
    model: type[Model], values: Mapping[str, Any], origin: str, origins: Mapping[str, str] | None = None
) -> Model:
    """The model, or UsageError; a wrong value is blamed on its key's entry in `origins`, else on `origin`."""
    try:
        return model(**values)
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
    where = [str(part) if isinstance(part, str) else f"[{part}]" for part in first["loc"]]
    key = where[0] if where else ""
    origin = (origins or {}).get(key, origin)
    name = "".join(part if part.startswith("[") else f".{part}" for part in where).removeprefix(".")
    value: Any = values.get(key)
    if first["type"] == "missing":
        raise UsageError(f"{origin}: {name} is missing")
    if first["type"] == "extra_forbidden":
        raise UsageError(_unknown_key(key, tuple(model.model_fields), origin))
    text = _allowed(first, key)
    if not name:
        raise UsageError(f"{_LAYERS.get(origin, origin)}: {text}")
    if origins and key in origins:
        raise UsageError(f"{origin} {_shown(value)}: {text}")
    if _by_key(origin):
        raise UsageError(f"{_origin_text(origin, key)} {_shown(value)}: {text}")
    raise UsageError(f"{origin}: {name}: {_shown(value)}: {text}")


def _allowed(error: ErrorDetails, key: str) -> str:
    """What the value of `key` must be, in our words instead of pydantic's."""
    context = error.get("ctx", {})
    kind = error["type"]
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind]}"
    for limit, words in _LIMITS.items():
        if limit in context and kind.startswith(("greater", "less")):
            return f"must be {words} {value_with_unit(key, context[limit])}"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind == "literal_error":
        return f"allowed: {context['expected']}"
    return error["msg"].replace("Input should", "must")


def _shown(value: Any) -> str:
    """As it stands in the file, where YAML's words are not Python's."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _unknown_key(key: str, allowed: tuple[str, ...], where: str) -> str:
    near = [name for name in allowed if name.lower() == key.lower()] or difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`fusecache config show` lists all keys"
    return f"{where}: unknown key {key!r}; {hint}"


def _unknown_cluster(name: str, clusters: Mapping[str, ClusterConfig], file: Path | None) -> str:
    if file is None:
        return (
            f"cluster {name!r} is not known without a configuration file; "
            f"give --config FILE, or alluxio://HOST:19998/PATH, or ./{name}:... for a folder"
        )
    known = ", ".join(sorted(clusters)) or "none"
    return f"no cluster {name!r} in {file}; known: {known}"


def _refuse_unknown(values: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in allowed:
            raise UsageError(_unknown_key(str(key), allowed, where))


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Our variables by key. UsageError for an unknown one: a misspelt setting must not be silently absent."""
    values: dict[str, str] = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or _FOREIGN_VARIABLE.fullmatch(variable):
            continue
        key = variable.removeprefix(PREFIX).lower()
        if variable != variable.upper() or not (
            key in Settings.model_fields or key in CLUSTER_KEYS or key in _MAPPING_KEYS
        ):
            allowed = tuple(PREFIX + name.upper() for name in (*Settings.model_fields, *CLUSTER_KEYS, *_MAPPING_KEYS))
            raise UsageError(_unknown_key(variable, allowed, "environment").replace("unknown key", "unknown variable"))
        values[key] = value
    return values


def _split_list(value: Any) -> Any:
    """Lists in a variable are separated by commas; flags are given several times and arrive as lists."""
    return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value


def _within(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder.rstrip(b"/") + b"/")


def _clusters(value: Any, where: str) -> dict[str, ClusterConfig]:
    clusters = _entries(ClusterConfig, value, f"{where}: clusters", "name")
    return {cluster.name: cluster for cluster in clusters}


def _mounts(value: Any, where: str) -> tuple[MountConfig, ...]:
    split: list[dict[str, Any]] = []
    for position, entry in enumerate(_list(value, f"{where}: mounts")):
        place = f"{where}: mounts[{position}]"
        _refuse_unknown(entry, ("source", "mountpoint", *Settings.model_fields), place)
        own: dict[str, Any] = {key: entry[key] for key in ("source", "mountpoint") if key in entry}
        for key, value_of_key in own.items():
            text = str(value_of_key)
            relative = not text.startswith("/") if key == "mountpoint" else text.startswith((".", "~"))
            if relative:
                raise UsageError(f"{place}: {key}: {text!r}: must be an absolute path in a file")
        overrides = {key: entry[key] for key in entry if key in Settings.model_fields}
        split.append({**own, "overrides": overrides})
    mounts = _entries(MountConfig, split, f"{where}: mounts", "mountpoint")
    for position, mount in enumerate(mounts):
        for other in mounts:
            if other.mountpoint in mount.mountpoint.parents:
                raise UsageError(
                    f"{where}: mounts[{position}]: mountpoint {str(mount.mountpoint)!r} lies below another one, "
                    f"{str(other.mountpoint)!r}, which is read-only once it is mounted; give a folder beside it"
                )
    return mounts


def _mapping(
    model: type[Model], section: str, document: Mapping[str, Any], variables: Mapping[str, str], where: str
) -> Model | None:
    """A section that is one mapping; variables stand above the file.

    None when it is not in the file and the variables lack what it must have: a DaemonSet gives every pod its node's
    name, which alone does not make a node report.
    """
    given = document.get(section)
    if given is not None and not isinstance(given, dict):
        raise UsageError(f"{where}: {section}: {_shown(given)}: must be a mapping of keys to values")
    values: dict[str, Any] = dict(given or {})
    origins: Origins = {}
    for name, value in variables.items():
        if name in _MAPPING_KEYS and _MAPPING_KEYS[name][0] == section:
            key = _MAPPING_KEYS[name][1]
            values[key] = value
            origins[key] = PREFIX + name.upper()
    required = {key for key, field_of_key in model.model_fields.items() if field_of_key.is_required()}
    if given is None and (not values or not required <= values.keys()):
        return None
    return _validated(model, values, f"{where}: {section}", origins)


def _entries(model: type[Model], value: Any, where: str, unique: str) -> tuple[Model, ...]:
    """A list of mappings as models; `unique` is the key that no two may share."""
    entries = []
    seen: set[Any] = set()
    for position, entry in enumerate(_list(value, where)):
        made = _validated(model, entry, f"{where}[{position}]")
        identity = getattr(made, unique)
        if identity in seen:
            raise UsageError(f"{where}[{position}]: {unique} {str(identity)!r} is given twice; each must be unique")
        seen.add(identity)
        entries.append(made)
    return tuple(entries)


def _list(value: Any, where: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{where}: {_shown(value)}: must be a list")
    for position, entry in enumerate(value):
        if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
            raise UsageError(f"{where}[{position}]: {_shown(entry)}: must be a mapping of keys to values")
    return value


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, and takes only plain decimal numbers for integers.

    YAML 1.1 reads `0555` as octal and `1:30` as 90: here both stay texts, for the parsers in `units`.
    """


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    loader.flatten_mapping(node)
    values: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no text", key_node.start_mark)
        if key in values:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        values[key] = loader.construct_object(value_node, deep=True)
    return values


_INT = "tag:yaml.org,2002:int"
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as failure:
        raise UsageError(f"configuration file {str(file)!r} can't be read: {failure.strerror}") from None
    except UnicodeDecodeError as failure:
        raise UsageError(f"configuration file {str(file)!r} is not UTF-8 (byte {failure.start})") from None
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = failure.problem or "not YAML"
        if failure.context and problem.startswith("but "):
            problem = f"{failure.context}, {problem}"
        raise UsageError(f"{file}{line}: {problem}") from None
    except yaml.YAMLError as failure:
        raise UsageError(f"{file}: not YAML: {' '.join(str(failure).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{file}: {_shown(document)}: must be a mapping of keys to values")
    return document

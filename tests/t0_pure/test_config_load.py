"""file < environment < flags; origins; errors that name where, key, value and what is allowed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from fusecache.config.load import Configuration, load
from fusecache.errors import UsageError

WHOLE = """
    refresh_s: 5m
    mode_mask: 0444
    fetch_bytes: 8MiB
    data_threads: 4
    clusters:
      - name: train
        masters: [m1, "m2:20000"]
        user: alice
      - {name: other, masters: [o1]}
    mounts:
      - {source: "train:/imagenet", mountpoint: /mnt/a, immutable: true, data_threads: 8}
      - {source: "alluxio://x1:1/y", mountpoint: /mnt/b}
    datasets:
      - {name: inside, path: "train:/imagenet/val", refresh_s: 10s}
      - {name: around, path: "train:/", immutable: true}
      - {name: beside, path: "train:/imagenet2"}
      - {name: elsewhere, path: "other:/imagenet"}
"""


def config_file(folder: Path, text: str) -> Path:
    file = folder / "fusecache.yaml"
    file.write_text(textwrap.dedent(text))
    return file


@pytest.fixture
def whole(tmp_path: Path) -> Configuration:
    return load(config_file(tmp_path, WHOLE), {}, {})


def test_load_nothing_given_is_all_defaults() -> None:
    configuration = load(None, {"PATH": "/bin"}, {})
    assert set(configuration.origins.values()) == {"default"}
    assert configuration.mounts == ()


def test_load_layers_win_in_order_and_origins_tell(tmp_path: Path) -> None:
    file = config_file(tmp_path, WHOLE)
    environment = {"FUSECACHE_REFRESH_S": "4m", "FUSECACHE_FETCH_BYTES": "2MiB"}
    configuration = load(file, environment, {"fetch_bytes": "1MiB"})
    settings, origins = configuration.settings, configuration.origins
    assert (settings.data_threads, settings.refresh_s, settings.fetch_bytes) == (4, 240.0, 1 << 20)
    assert origins["data_threads"] == str(file)
    assert origins["refresh_s"] == "FUSECACHE_REFRESH_S"
    assert origins["fetch_bytes"] == "--fetch-bytes"
    assert origins["stall_s"] == "default"


def test_load_file_named_by_variable_is_read(tmp_path: Path) -> None:
    file = config_file(tmp_path, "refresh_s: 7")
    assert load(None, {"FUSECACHE_CONFIG": str(file)}, {}).settings.refresh_s == 7.0


@pytest.mark.parametrize("written", ["0444", "0o444", "444", '"0444"'])
def test_load_mode_is_octal_however_it_is_written(tmp_path: Path, written: str) -> None:
    assert load(config_file(tmp_path, f"mode_mask: {written}"), {}, {}).settings.mode_mask == 0o444


def test_load_mount_overrides_stand_between_file_and_environment(tmp_path: Path) -> None:
    file = config_file(tmp_path, WHOLE)
    configuration = load(file, {}, {})
    settings, origins = configuration.settings_of(configuration.mounts[0])
    assert (settings.data_threads, settings.immutable, settings.refresh_s) == (8, True, 300.0)
    assert origins["data_threads"] == f"{file}: mount /mnt/a"
    configuration = load(file, {"FUSECACHE_DATA_THREADS": "2"}, {})
    assert configuration.settings_of(configuration.mounts[0])[0].data_threads == 2


def test_plan_of_mount_has_cluster_path_settings_and_its_datasets(whole: Configuration) -> None:
    plan = whole.plan_of(whole.mounts[0])
    assert plan.cluster is not None
    assert (plan.cluster.name, plan.cluster.masters, plan.cluster.user) == ("train", ("m1:19998", "m2:20000"), "alice")
    assert (plan.path, plan.folder, plan.mountpoint) == (b"/imagenet", None, Path("/mnt/a"))
    assert plan.settings.immutable
    assert [(dataset.name, dataset.path) for dataset in plan.datasets] == [
        ("inside", b"/imagenet/val"),
        ("around", b"/"),
    ]


def test_plan_of_url_of_a_known_cluster_takes_its_user(whole: Configuration) -> None:
    plan = whole.plan("alluxio://m2:20000,m1/imagenet", Path("/mnt/c"))
    assert plan.cluster is not None
    assert plan.cluster.user == "alice"


def test_plan_of_unknown_url_has_no_datasets(whole: Configuration) -> None:
    assert whole.plan_of(whole.mounts[1]).datasets == ()


def test_plan_of_folder_has_no_cluster(tmp_path: Path) -> None:
    plan = load(None, {}, {}).plan(str(tmp_path), Path("mnt"))
    assert (plan.cluster, plan.folder, plan.path) == (None, tmp_path, b"/")
    assert plan.mountpoint.is_absolute()


def test_plan_cluster_keys_from_environment_and_flags_win(tmp_path: Path) -> None:
    file = config_file(tmp_path, WHOLE)
    environment = {"FUSECACHE_USER": "bob", "FUSECACHE_TIER_FOLDERS": "/t1,/t2"}
    plan = load(file, environment, {"user": "carol", "node_hosts": ("n1", "n2")}).plan("train:/x", Path("/m"))
    assert plan.cluster is not None
    assert plan.cluster.user == "carol"
    assert plan.cluster.tier_folders == ("/t1", "/t2")
    assert plan.cluster.node_hosts == ("n1", "n2")


def test_plan_cluster_flag_for_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tier-folder is for a cluster.*is a folder"):
        load(None, {}, {"tier_folders": ("/x",)}).plan(str(tmp_path), Path("/m"))


def test_plan_unknown_cluster_names_the_known(whole: Configuration) -> None:
    with pytest.raises(UsageError, match=r"no cluster 'trian'.*known: other, train"):
        whole.plan("trian:/x", Path("/m"))


def test_plan_cluster_without_file_says_where_to_write_it() -> None:
    with pytest.raises(UsageError, match=r"'train'.*--config FILE"):
        load(None, {}, {}).plan("train:/x", Path("/m"))


WRONG_FILES = [
    ("refesh_s: 1", ["'refesh_s'", "did you mean 'refresh_s'"]),
    ("zzz: 1", ["'zzz'", "config show"]),
    ("refresh_s: soon", ["refresh_s", "'soon'", "ms, s, m, h, d"]),
    ("refresh_s: true", ["refresh_s", "true", "seconds"]),
    ("refresh_s: .inf", ["refresh_s", "inf"]),
    ("fetch_bytes: 3", ["fetch_bytes", "3", "at least 64KiB"]),
    ("fetch_bytes: 2TiB", ["fetch_bytes: '2TiB': must be at most 1GiB"]),
    ("refresh_s:", ["refresh_s: null: not a duration"]),
    ("silent_s: 2h", ["silent_s: '2h': must be at most 1h"]),
    ("workers: 2.5", ["workers: 2.5: must be a whole number"]),
    ("workers: two", ["workers: 'two': must be a whole number"]),
    ("Workers: 2", ["'Workers'", "did you mean 'workers'"]),
    ("immutable: 2", ["immutable: 2: must be true or false"]),
    ("state_dir: 3", ["state_dir: 3: must be a path"]),
    ("metrics_address: 9464", ["metrics_address: 9464: must be a text"]),
    ("owner_map: [a]", ["owner_map: ['a']: must be a mapping of names to numbers"]),
    ("mode_mask: 7777", ["mode_mask: '7777': must be at most 0777"]),
    ("uid: 99999999999", ["uid: 99999999999: must be less than 4294967295"]),
    ("touch_calls_per_s: 0", ["touch_calls_per_s: 0: must be more than 0"]),
    ("{? {a: 1} : 2}", ["line 1", "key {'a': 1} is no text"]),
    ("a: 1\n---\nb: 2", ["line 2", "expected a single document in the stream, but found another document"]),
    ("fetch_bytes: 4M", ["fetch_bytes", "'4M'", "MiB"]),
    ("read_type: ufs", ["read_type", "'ufs'", "'cache' or 'no_cache'"]),
    ("mode_mask: 999", ["mode_mask", "'999'", "octal"]),
    ("owner_map: {alice: x}", ["owner_map.alice", "'x'"]),
    ("a: 1\na: 2", ["line 2", "'a' is given twice"]),
    ("[1", ["line 1"]),
    ("- 1", ["mapping"]),
    ("mounts: 3", ["mounts", "3", "list"]),
    ("mounts: [3]", ["mounts[0]", "mapping"]),
    ("mounts: [{mountpoint: /m}]", ["mounts[0]", "source is missing"]),
    ("mounts: [{source: /a, mountpoint: m}]", ["mounts[0]", "mountpoint", "'m'", "absolute"]),
    ("mounts: [{source: ./a, mountpoint: /m}]", ["mounts[0]", "source", "'./a'", "absolute"]),
    ("mounts: [{source: 'hdfs://a/b', mountpoint: /m}]", ["'hdfs'"]),
    ("mounts: [{source: 'b:/x', mountpoint: /m}]", ["no cluster 'b'", "known: none"]),
    ("mounts: [{source: /a, mountpoint: /m, refresh: 1}]", ["mounts[0]", "'refresh'", "did you mean 'refresh_s'"]),
    ("mounts: [{source: /a, mountpoint: /m, refresh_s: x}]", ["mount /m", "refresh_s", "'x'"]),
    ("mounts: [{source: /a, mountpoint: /m}, {source: /b, mountpoint: /m}]", ["mounts[1]", "'/m'", "twice"]),
    ("mounts: [{source: /a, mountpoint: /m/x}, {source: /b, mountpoint: /m}]", ["mounts[0]", "'/m/x' lies below"]),
    ("clusters: [{name: a}]", ["clusters[0]", "masters is missing"]),
    ("clusters: [{name: a, masters: []}]", ["clusters[0]", "masters: []: must be a list of at least one"]),
    ("clusters: [{name: a, masters: ['m:99999']}]", ["clusters[0]", "'99999'", "65535"]),
    ("clusters: [{name: a b, masters: [m]}]", ["clusters[0]", "name", "'a b': must be 1 to 63 of letters"]),
    ("clusters: [{name: a, masters: m}]", ["clusters[0]", "masters: 'm': must be a list"]),
    ("clusters: [{name: a, masters: [m], user: ''}]", ["clusters[0]", "user: '': must be a text that is not empty"]),
    ("clusters: [{name: a, masters: [m], auth: kerberos}]", ["auth", "'kerberos'", "'nosasl'"]),
    ("clusters: [{name: a, masters: [m], tls_key_file: /k}]", ["belong together"]),
    ("clusters: [{name: a, masters: [m]}, {name: a, masters: [n]}]", ["clusters[1]", "'a'", "twice"]),
    ("datasets: [{name: a, path: /x}]", ["datasets", "'/x'", "CLUSTER:/PATH"]),
    ("datasets: [{name: a, path: 'c:/x'}]", ["datasets", "no cluster 'c'"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named"), WRONG_FILES, ids=[text for text, _ in WRONG_FILES])
def test_load_wrong_file_is_one_line_with_file_key_and_value(tmp_path: Path, text: str, named: list[str]) -> None:
    file = config_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(file, {}, {})
    line = str(caught.value)
    assert "\n" not in line
    for part in named:
        assert part in line
    if "hdfs" not in text and "datasets" not in text:
        assert str(file) in line


def test_load_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.yaml' can't be read: No such file"):
        load(tmp_path / "nowhere.yaml", {}, {})


def test_load_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"state_dir: /caf\xe9\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        load(file, {}, {})


@pytest.mark.parametrize("variable", ["FUSECACHE_REFRESH", "FUSECACHE_refresh_s", "FUSECACHE_MASTERS"])
def test_load_unknown_variable_is_an_error(variable: str) -> None:
    with pytest.raises(UsageError, match=f"unknown variable '{variable}'"):
        load(None, {variable: "1"}, {})


def test_load_variable_in_small_letters_is_told_how_it_is_written() -> None:
    with pytest.raises(UsageError, match="'FUSECACHE_refresh_s'; did you mean 'FUSECACHE_REFRESH_S'"):
        load(None, {"FUSECACHE_refresh_s": "1"}, {})


def test_plan_wrong_source_of_a_mount_is_told_with_its_file_and_mount(tmp_path: Path) -> None:
    file = config_file(tmp_path, "mounts: [{source: /no/such, mountpoint: /m}]")
    configuration = load(file, {}, {})
    with pytest.raises(UsageError, match=f"^{file}: mount /m: SOURCE '/no/such' does not exist"):
        configuration.plan_of(configuration.mounts[0])


def test_plan_keys_that_belong_together_are_blamed_on_the_flags() -> None:
    with pytest.raises(UsageError, match=r"^flags: tls_cert_file and tls_key_file belong together"):
        load(None, {}, {"tls_cert_file": "/c"}).plan("alluxio://m/x", Path("/m"))
    with pytest.raises(UsageError, match=r"^environment: tls_cert_file and tls_key_file belong together"):
        load(None, {"FUSECACHE_TLS_KEY_FILE": "/k"}, {}).plan("alluxio://m/x", Path("/m"))


@pytest.mark.parametrize(
    "variable",
    ["FUSECACHE_SERVICE_HOST", "FUSECACHE_SERVICE_PORT_METRICS", "FUSECACHE_PORT", "FUSECACHE_PORT_9464_TCP_ADDR",
     "FUSECACHE_CONTROLLER_SERVICE_PORT", "FUSECACHE_TEST_CLUSTER"],
)  # fmt: skip
def test_load_variables_that_kubernetes_makes_are_not_ours(variable: str) -> None:
    assert load(None, {variable: "tcp://10.0.0.1:9464"}, {}).settings.refresh_s == 600.0


def test_load_wrong_variable_and_flag_are_named() -> None:
    with pytest.raises(UsageError, match="FUSECACHE_REFRESH_S '1x': not a duration"):
        load(None, {"FUSECACHE_REFRESH_S": "1x"}, {})
    with pytest.raises(UsageError, match="--refresh-s '1x': not a duration"):
        load(None, {}, {"refresh_s": "1x"})


def test_load_wrong_value_is_an_error_though_a_later_layer_overrides_it(tmp_path: Path) -> None:
    file = config_file(tmp_path, "refresh_s: soon")
    with pytest.raises(UsageError, match="'soon'"):
        load(file, {}, {"refresh_s": "1"})

"""Memory and cores that a container or a batch job leaves to this process, from its control groups."""

from types import SimpleNamespace

import pytest

from valor import machine

GIB = 1 << 30
NAMES = {"v2": ("", "memory.max", "memory.current", "inactive_file")}
NAMES["v1"] = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A machine of 64 GiB, 48 of them available, with these control groups: limit, used, inactive files by folder."""

    def make(version: str, member_of: str, groups: dict[str, tuple[str, int, int]]) -> machine.Memory:
        controller, limit_file, used_file, inactive = NAMES[version]
        for folder, (limit, used, files) in groups.items():
            group = tmp_path / controller / folder
            group.mkdir(parents=True, exist_ok=True)
            (group / limit_file).write_text(f"{limit}\n")
            (group / used_file).write_text(f"{used}\n")
            (group / "memory.stat").write_text(f"anon 5\n{inactive} {files}\n")
        (tmp_path / "membership").write_text(f"5:cpu,cpuacct:/x\n{0}:{controller}:{member_of}\n")
        monkeypatch.setattr(machine, "_MOUNT", tmp_path)
        monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
        return machine.memory()

    return make


@pytest.mark.parametrize("version", NAMES)
def test_a_container_has_its_limit_less_what_it_uses(here, version):
    """Its own group is the uppermost that it sees, whatever it is called outside; pages of files can be had back."""
    assert here(version, "/docker/12ab", {"": (str(8 * GIB), 3 * GIB, GIB)}) == (8 * GIB, 6 * GIB)


@pytest.mark.parametrize("version", NAMES)
def test_the_limits_of_all_groups_above_a_job_hold(here, version):
    unlimited = {"v2": "max", "v1": "9223372036854771712"}[version]
    groups = {"": (unlimited, 0, 0), "slurm": (str(32 * GIB), 31 * GIB, 0), "slurm/job": (str(16 * GIB), 2 * GIB, 0)}
    assert here(version, "/slurm/job", groups) == (16 * GIB, GIB)


def test_what_uses_more_than_its_limit_has_nothing_left(here):
    assert here("v2", "/", {"": (str(GIB), 2 * GIB, 0)}) == (GIB, 0)


def test_without_limits_it_is_the_machine(here):
    assert here("v2", "/user.slice", {}) == (64 * GIB, 48 * GIB)
    assert here("v2", "/user.slice", {"user.slice": ("max", GIB, 0)}) == (64 * GIB, 48 * GIB)


@pytest.mark.parametrize(
    ("controller", "files", "cores"),
    [
        ("", {"job/cpu.max": "200000 100000\n", "cpu.max": "max 100000\n"}, 2),
        ("", {"job/cpu.max": "max 100000\n", "cpu.max": "25000 50000\n"}, 1),
        ("", {"job/cpu.max": "150000 100000\n"}, 2),
        ("", {"job/cpu.max": "max 100000\n"}, 16),
        ("", {"job/cpu.max": "9900000 100000\n"}, 16),
        ("cpu", {"job/cpu.cfs_quota_us": "400000\n", "job/cpu.cfs_period_us": "100000\n"}, 4),
        ("cpu", {"job/cpu.cfs_quota_us": "-1\n", "job/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_a_share_of_time_is_as_many_cores(controller, files, cores, monkeypatch, tmp_path):
    for name, text in files.items():
        (tmp_path / controller / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / controller / name).write_text(text)
    (tmp_path / "membership").write_text(f"{0}:{f'{controller},cpuacct' if controller else ''}:/job\n")
    monkeypatch.setattr(machine, "_MOUNT", tmp_path)
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert machine.available_cores() == cores

"""CIFAR-10 is read exactly from its binary files or from images, or refused with a reason."""

import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdnn.data import cifar10
from hdnn.errors import DataError, HDNNError, MissingExtraError, OptionError, ShapeError

DATA = Path(os.environ.get("HDNN_DATA") or "data")


# CIFAR-10, binary.


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Binary files of 20 records each in tmp_path/cifar-10-batches-bin, by name."""
    random = np.random.default_rng(0)
    folder = tmp_path / cifar10.BINARY
    folder.mkdir()
    contents = {}
    for name in cifar10.FILES:
        records = random.integers(0, 256, (20, cifar10.RECORD))
        records[:, 0] = np.arange(20) % 10
        contents[name] = records.astype(np.uint8).tobytes()
        (folder / name).write_bytes(contents[name])
    accept(monkeypatch, contents)
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    monkeypatch.setenv("HDNN_DATA", str(tmp_path))
    monkeypatch.setenv("HDNN_CACHE", str(tmp_path / "cache"))
    return contents


def accept(monkeypatch, contents):
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(cifar10, "FILES", hashes)


def pack(path, members, mode="w:gz"):
    """Write a tar of (name or TarInfo, content)."""
    with tarfile.open(path, mode) as archive:
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def pack_binary(path, contents):
    return pack(path, [(f"{cifar10.BINARY}/{name}", c) for name, c in contents.items()])


def test_cifar10_is_what_is_in_the_binary_files(small_cifar, tmp_path):
    archive = pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar)
    records = np.frombuffer(b"".join(small_cifar.values()), np.uint8).reshape(120, -1)
    pixels, labels = records[:, 1:].reshape(120, 3, 32, 32), records[:, 0]
    for place in (None, tmp_path, tmp_path / cifar10.BINARY, archive):
        data = cifar10.load(place)
        assert data.name == "CIFAR-10"
        assert not data.lossy
        assert "original" in data.remark
        assert np.array_equal(torch.cat([data.images_train, data.images_test]).numpy(), pixels)
        assert np.array_equal(torch.cat([data.t_train, data.t_test]).numpy(), labels)
        assert len(data.t_test) == 20
    other = archive.rename(tmp_path / "other.tar.gz")
    assert torch.equal(cifar10.load(other, source="binary").images_test, data.images_test)


def test_the_binary_files_can_be_limited(small_cifar):
    whole, data = cifar10.load(), cifar10.load(limit=1)
    assert data.t_train.tolist() == data.t_test.tolist() == list(range(10))
    assert torch.equal(data.images_train, whole.images_train[:10])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:-1], "20 records of 3073 bytes, 61460 in all, but has 61459"),
        (lambda c: c + b"\0", "but has more"),
        (lambda c: b"\1" + c[1:], "SHA-256"),
    ],
)
def test_a_damaged_binary_file_is_refused(small_cifar, tmp_path, change, message, packed):
    name = "data_batch_3.bin"
    small_cifar[name] = change(small_cifar[name])
    (tmp_path / cifar10.BINARY / name).write_bytes(small_cifar[name])
    place = pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar) if packed else tmp_path
    with pytest.raises(DataError, match=message) as error:
        cifar10.load(place)
    assert name in str(error.value)


def test_a_label_above_nine_is_refused(small_cifar, tmp_path, monkeypatch):
    small_cifar["test_batch.bin"] = b"\12" + small_cifar["test_batch.bin"][1:]
    accept(monkeypatch, small_cifar)
    (tmp_path / cifar10.BINARY / "test_batch.bin").write_bytes(small_cifar["test_batch.bin"])
    with pytest.raises(DataError, match="test labels must be 0 to 9, but reach from 0 to 10"):
        cifar10.load()


def test_a_missing_binary_file_is_named(small_cifar, tmp_path):
    (tmp_path / cifar10.BINARY / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin/data_batch_2\.bin in .*--to"):
        cifar10.load()
    pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar)  # complete, and so preferred
    assert cifar10.load().name == "CIFAR-10"


@pytest.mark.parametrize("change", [lambda c: c[: len(c) // 2], lambda c: b"no tar" * 1000])
def test_a_damaged_archive_is_refused(small_cifar, tmp_path, change):
    archive = pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar)
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(DataError, match=re.escape(f"{archive} cannot be read")):
        cifar10.load(archive)


# CIFAR-10, images.


def encoded(pixels, kind="PNG", **options):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def small_images(tmp_path, monkeypatch):
    """The PNG files of a set with 3 and 2 images of a class, by name; pixels by part."""
    random = np.random.default_rng(0)
    monkeypatch.setattr(cifar10, "COUNTS", {"train": 3, "test": 2})
    monkeypatch.setenv("HDNN_DATA", str(tmp_path))
    monkeypatch.setenv("HDNN_CACHE", str(tmp_path / "cache"))
    pixels = {}
    for part, count in cifar10.COUNTS.items():
        for label in cifar10.CLASSES:
            for number in range(count):
                pixels[f"{part}/{label}/{number:04}.png"] = random.integers(
                    0, 256, (32, 32, 3), dtype=np.uint8
                )
    return pixels


def pngs(pixels):
    return [(name, encoded(image)) for name, image in pixels.items()]


def assert_is(data, pixels):
    for part, found in (("train", data.images_train), ("test", data.images_test)):
        expected = [image for name, image in pixels.items() if name.startswith(part)]
        assert np.array_equal(found.numpy().transpose(0, 2, 3, 1), np.stack(expected))
    assert data.t_train.tolist() == [label for label in range(10) for _ in range(3)]
    assert data.t_test.tolist() == [label for label in range(10) for _ in range(2)]


@pytest.mark.parametrize(("ending", "mode"), [("", "w"), (".xz", "w:xz"), (".gz", "w:gz")])
def test_images_are_read_from_an_archive_in_the_order_of_their_names(
    small_images, tmp_path, ending, mode
):
    path = tmp_path / f"cifar10-png.tar{ending}"
    members = [(f"./set/{name}", content) for name, content in reversed(pngs(small_images))]
    pack(path, [("README", b"a text"), *members], mode)
    data = cifar10.load()
    assert_is(data, small_images)
    assert data.name == "CIFAR-10 (PNG)"
    assert not data.lossy
    limited = cifar10.load(path, source="images", limit=1)
    assert torch.equal(limited.images_train, data.images_train[::3])
    assert torch.equal(limited.images_test, data.images_test[::2])


def write_folder(folder, pixels):
    for name, content in pngs(pixels):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_images_are_read_from_a_folder_and_links_are_not_followed(small_images, tmp_path):
    folder = tmp_path / "cifar10"
    write_folder(folder, small_images)
    for _ in range(2):  # the second time from the cache
        assert_is(cifar10.load(), small_images)
    assert_is(cifar10.load(folder), small_images)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    path = folder / "train" / "cat" / "0001.png"
    path.rename(tmp_path / "elsewhere.png")
    path.symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(DataError, match=r"2 images in train/cat \(1 links or unsafe names"):
        cifar10.load()


@pytest.mark.parametrize("quality", [75, 30, 100])
def test_a_jpeg_set_is_named_after_its_quality(small_images, tmp_path, quality):
    members = [
        (name.replace(".png", ".jpg"), encoded(image, "JPEG", quality=quality))
        for name, image in small_images.items()
    ]
    pack(tmp_path / "cifar10-jpeg.tar.xz", members, "w:xz")
    for _ in range(2):
        data = cifar10.load()
        assert data.name == f"CIFAR-10 (JPEG q{quality})"
        assert data.lossy
        assert "report results under this name" in data.remark


def test_a_jpeg_set_of_several_qualities_has_none_in_its_name(small_images, tmp_path):
    members = [
        (name.replace(".png", ".jpg"), encoded(image, "JPEG", quality=75 + number % 2))
        for number, (name, image) in enumerate(small_images.items())
    ]
    assert cifar10.load(pack(tmp_path / "set.tar.gz", members)).name == "CIFAR-10 (JPEG)"


def test_the_binary_distribution_is_preferred_to_images(small_cifar, tmp_path):
    (tmp_path / "cifar10" / "train").mkdir(parents=True)
    assert cifar10.load().name == "CIFAR-10"
    with pytest.raises(DataError, match="0 images in train/airplane, but CIFAR-10 has 5000"):
        cifar10.load(source="images")


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        special("train/cat/0001.png", tarfile.SYMTYPE, "/etc/passwd"),
        special("train/cat/0001.png", tarfile.LNKTYPE, "train/cat/0000.png"),
        special("train/cat/0001.png", tarfile.FIFOTYPE),
        special("/train/cat/0001.png", tarfile.REGTYPE),
        special("../train/cat/0001.png", tarfile.REGTYPE),
        special("x/../train/cat/0001.png", tarfile.REGTYPE),
    ],
)
def test_links_and_unsafe_names_in_an_archive_are_ignored(small_images, tmp_path, member):
    whole = pngs(small_images)
    path = pack(tmp_path / "set.tar.gz", [*whole, (member, b"")])
    before = sorted(tmp_path.iterdir())
    assert_is(cifar10.load(path, limit=3), small_images)
    rest = [(name, content) for name, content in whole if name != "train/cat/0001.png"]
    pack(path, [*rest, (member, b"")])
    with pytest.raises(DataError, match=r"2 images in train/cat \(1 links or unsafe names ignored"):
        cifar10.load(path)
    assert sorted(tmp_path.iterdir()) == before  # nothing was unpacked


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/cat/0001.png", b"no image", "cannot be decoded as an image"),
        ("train/cat/0001.png", b"", "cannot be decoded as an image"),
        ("train/cat/0001.png", "cut", "cannot be decoded as an image"),
        ("train/cat/0001.png", "large", "33 x 32 pixels in mode RGB, but CIFAR-10 has 32 x 32"),
        ("train/cat/0001.png", "grey", "32 x 32 pixels in mode L"),
        ("train/cat/0001.png", b"x" * 70000, "70000 bytes, too many"),
        ("train/cat/notes.txt", b"text", r"notes\.txt is no \.jpg or \.png file"),
        ("train/fish/0001.png", b"", "class 'fish', which CIFAR-10 does not have"),
        ("train/cat/0003.png", b"", "has 4 images in train/cat, but CIFAR-10 has 3"),
        ("other/train/cat/0000.png", b"", "is there twice"),
    ],
)
def test_a_member_that_is_no_such_image_is_refused(small_images, tmp_path, name, content, message):
    made = {
        "cut": lambda: encoded(small_images["train/cat/0001.png"])[:500],
        "large": lambda: encoded(np.zeros((32, 33, 3), np.uint8)),
        "grey": lambda: encoded(np.zeros((32, 32), np.uint8)),
    }
    members = dict(pngs(small_images))
    if name == "train/cat/0003.png":
        del members["test/truck/0001.png"]  # as many as there should be, but not the same
    members[name] = made[content]() if isinstance(content, str) else content
    with pytest.raises(DataError, match=message):
        cifar10.load(pack(tmp_path / "set.tar.gz", members.items()))


def test_more_images_than_there_are_in_the_set_are_refused(small_images, tmp_path):
    extra = [(f"train/cat/{number}.png", b"") for number in range(5)]
    with pytest.raises(DataError, match="more than the 50 images"):
        cifar10.load(pack(tmp_path / "set.tar.gz", [*pngs(small_images), *extra]))
    many = [(str(number), b"") for number in range(1102)]
    with pytest.raises(DataError, match="more than 1101 members"):
        cifar10.load(pack(tmp_path / "set.tar.gz", many))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_an_archive_that_is_cut_off_is_refused(small_images, tmp_path, mode, share):
    path = pack(tmp_path / "set.tar", pngs(small_images), mode)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"cannot be read|images in"):
        cifar10.load(path)


@given(st.data())
def test_no_damage_to_an_archive_makes_the_reader_fail_otherwise(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    mode = data.draw(st.sampled_from(["w", "w:gz", "w:xz"]))
    content = bytearray(pack(path, [("train/cat/0.png", b"x" * 100)], mode).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(DataError):
        cifar10.load(path, source="images", limit=1)


def test_without_pillow_the_extra_is_named(small_images, tmp_path, monkeypatch):
    path = pack(tmp_path / "set.tar.gz", pngs(small_images))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[images\]'"):
        cifar10.load(path)


def test_a_cache_that_was_changed_is_decoded_again(small_images, tmp_path):
    path = pack(tmp_path / "set.tar.gz", pngs(small_images))
    cifar10.load(path)
    (cache,) = (tmp_path / "cache").iterdir()
    assert cache.name == f"cifar10-{hashlib.sha256(path.read_bytes()).hexdigest()}.safetensors"
    content = cache.read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    for damaged in (changed, content[:-100], b"", content.replace(b"format", b"tamrof")):
        cache.write_bytes(damaged)
        assert_is(cifar10.load(path), small_images)
        assert cache.read_bytes() == content
    other = cache.with_name(f"cifar10-{'0' * 64}.safetensors")
    cache.rename(other)
    assert cifar10._from_cache(other, "0" * 64) is None  # of another source


def test_a_cache_that_cannot_be_written_is_a_warning(small_images, tmp_path, monkeypatch):
    path = pack(tmp_path / "set.tar.gz", pngs(small_images))
    monkeypatch.setenv("HDNN_CACHE", str(path))
    with pytest.warns(UserWarning, match="not kept for the next time.*set HDNN_CACHE"):
        data = cifar10.load(path)
    assert_is(data, small_images)


def test_options_are_checked_before_anything_is_read(tmp_path):
    with pytest.raises(OptionError, match="Did you mean 'binary'"):
        cifar10.load(tmp_path, source="binaries")
    with pytest.raises(ShapeError, match="limit must be a whole number >= 1"):
        cifar10.load(tmp_path, limit=0)
    for source in cifar10.SOURCES:
        with pytest.raises(DataError, match=r"CIFAR-10 is not there.*download cifar10 --to"):
            cifar10.load(tmp_path / "nowhere", source=source)
    with pytest.raises(HDNNError, match="a path must be"):
        cifar10.load(3)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.skipif(
    not any(DATA.glob("cifar10-jpeg.tar.xz")), reason="needs CIFAR-10 in JPEG under HDNN_DATA"
)
def test_the_jpeg_set_is_reported_as_such():
    pytest.importorskip("PIL")
    data = cifar10.load(DATA / "cifar10-jpeg.tar.xz", limit=20)
    assert repr(data) == "ImageData(CIFAR-10 (JPEG q75), 200 train, 200 test, 3 x 32 x 32, cpu)"
    assert data.lossy
    x = data.normalised(torch.cat([data.images_train, data.images_test]), torch.float64)
    assert x.mean((0, 2, 3)).abs().max() < 0.2
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.2

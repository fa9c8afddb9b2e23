"""nvidia-smi's XML is read; XML that is made to do harm is refused."""

from __future__ import annotations

import pytest

from fsdpplan.topology.smi_xml import MAX_CHARACTERS, read_xml

HEAD = '<?xml version="1.0" ?>\n'
BOMB = "".join(f'<!ENTITY x{at + 1} "{f"&x{at};" * 10}">' for at in range(9))


def test_the_document_names_a_dtd_that_is_never_read() -> None:
    root = read_xml(f'{HEAD}<!DOCTYPE a SYSTEM "nvsmi_device_v12.dtd"><a><Bc x="1"> 4 </Bc></a>')
    assert root is not None
    assert (root.findtext("bc"), root.find("bc") is not None) == (" 4 ", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<a>",
        "<a></b>",
        "<a/><a/>",
        "NVIDIA-SMI has failed",
        "<a>&x;</a>",
        "<a>\ud800</a>",
        f'{HEAD}<!DOCTYPE a [<!ENTITY x "1">]><a>&x;</a>',
        f'{HEAD}<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><a>&x;</a>',
        f'{HEAD}<!DOCTYPE a [<!ENTITY x0 "1">{BOMB}]><a>&x9;</a>',
        f"{HEAD}<!DOCTYPE a []><a/>",
        f'{HEAD}<!DOCTYPE a SYSTEM "x.dtd"><a>81&x;559</a>',
        f'{HEAD}<!DOCTYPE a SYSTEM "x.dtd" [<!ENTITY % x SYSTEM "file:///etc/hostname">%x;]><a/>',
        "<a>" * 1000 + "</a>" * 1000,
        f"<a>{' ' * MAX_CHARACTERS}</a>",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_what_nvidia_smi_never_writes_is_refused(text: str) -> None:
    assert read_xml(text) is None

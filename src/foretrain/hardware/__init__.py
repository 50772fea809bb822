"""Devices, clusters, the cluster grammar, and the catalog of both."""

from __future__ import annotations

from foretrain.hardware.catalog import (
    NamedCluster,
    Price,
    find_price,
    list_clusters,
    resolve_cluster,
)
from foretrain.hardware.cluster import Cluster, GroupLayout
from foretrain.hardware.device import Device, UsualNode, device_from_mapping
from foretrain.hardware.fabrics import Fabric, list_fabrics
from foretrain.hardware.grammar import EXAMPLE, GRAMMAR, format_cluster, parse_cluster
from foretrain.hardware.names import find_device, find_devices, list_devices

__all__ = [
    "EXAMPLE",
    "GRAMMAR",
    "Cluster",
    "Device",
    "Fabric",
    "GroupLayout",
    "NamedCluster",
    "Price",
    "UsualNode",
    "device_from_mapping",
    "find_device",
    "find_devices",
    "find_price",
    "format_cluster",
    "list_clusters",
    "list_devices",
    "list_fabrics",
    "parse_cluster",
    "resolve_cluster",
]

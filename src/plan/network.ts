/**
 * How long the collectives of data parallel training take on paper: a fixed cost to start one, a latency for every hop,
 * and the bytes that pass the slowest link. The shape of the equations is that of NCCL's own choice between ring and
 * tree; docs/explain/scaling.md derives them.
 */

export interface Network {
  /** GPUs of a node. */
  readonly perNode: number;
  /** Bytes per second that one GPU sends inside a node. */
  readonly nodeBandwidth: number;
  /** Bytes per second that one GPU sends to other nodes. */
  readonly linkBandwidth: number;
  /** Seconds of a hop inside a node, and of one between nodes. */
  readonly nodeLatency: number;
  readonly linkLatency: number;
  /** Seconds to begin a collective at all. */
  readonly startLatency: number;
}

/** What NCCL's cost model takes for a ring over NVLink and over a network, rounded. */
export const START_LATENCY = 8e-6;
export const NODE_LATENCY = 3.4e-6;
export const LINK_LATENCY = 10e-6;

/** A tree keeps fewer links busy at once than a ring does. */
const TREE_BANDWIDTH = 0.9;

export function nodesOf({ perNode }: Network, ranks: number): number {
  return Math.ceil(ranks / perNode);
}

/**
 * Bytes per second of a ring through all ranks. It enters and leaves every node, on as many links as the node with the
 * fewest ranks has GPUs.
 */
export function ringBandwidth(network: Network, ranks: number): number {
  const nodes = nodesOf(network, ranks);
  if (nodes === 1) return network.nodeBandwidth;
  const fewest = Math.floor(ranks / nodes);
  const between = fewest * network.linkBandwidth;
  return fewest === 1 ? between : Math.min(network.nodeBandwidth, between);
}

/** Seconds until every rank has the sum of `bytes` of all: a ring, or a tree where its latency is worth more. */
export function allReduceSeconds(network: Network, ranks: number, bytes: number): number {
  if (ranks === 1) return 0;
  const nodes = nodesOf(network, ranks);
  const bandwidth = ringBandwidth(network, ranks);
  const { nodeLatency, linkLatency, startLatency } = network;
  const ring = 2 * passSeconds(network, ranks, bytes);
  const hops = (Math.ceil(ranks / nodes) - 1) * nodeLatency + Math.ceil(Math.log2(nodes)) * linkLatency;
  const tree = 2 * hops + (2 * bytes) / (TREE_BANDWIDTH * bandwidth);
  return startLatency + Math.min(ring, tree);
}

/** Seconds until every rank has its part of the sum, or all parts of the others: half of a ring. */
export function shardSeconds(network: Network, ranks: number, bytes: number): number {
  return ranks === 1 ? 0 : network.startLatency + passSeconds(network, ranks, bytes);
}

/** Once around the ring: ranks - 1 hops, each with a part of the bytes. */
function passSeconds(network: Network, ranks: number, bytes: number): number {
  const between = nodesOf(network, ranks) - 1;
  const inside = ranks - 1 - between;
  const latency = inside * network.nodeLatency + between * network.linkLatency;
  return latency + (((ranks - 1) / ranks) * bytes) / ringBandwidth(network, ranks);
}

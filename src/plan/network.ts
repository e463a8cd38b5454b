/**
 * Predicted time of the collectives of data-parallel training: a start-up cost, a latency per hop, and the bytes over the
 * slowest link, as in NCCL's choice between ring and tree. Derived in docs/explain/scaling.md.
 */

export interface Network {
  /** GPUs per node. */
  readonly perNode: number;
  /** Bytes per second of one GPU inside a node. */
  readonly nodeBandwidth: number;
  /** Bytes per second of one GPU to other nodes. */
  readonly linkBandwidth: number;
  /** Seconds per hop inside a node, and between nodes. */
  readonly nodeLatency: number;
  readonly linkLatency: number;
  /** Seconds to start a collective. */
  readonly startLatency: number;
}

/** Latencies of NCCL's cost model for a ring over NVLink and over a network, rounded. */
export const START_LATENCY = 8e-6;
export const NODE_LATENCY = 3.4e-6;
export const LINK_LATENCY = 10e-6;

/** A tree uses fewer links at once than a ring. */
const TREE_BANDWIDTH = 0.9;

export function nodesOf({ perNode }: Network, ranks: number): number {
  return Math.ceil(ranks / perNode);
}

/**
 * Bytes per second of a ring through all ranks. Between nodes it uses as many links as the node with the fewest ranks has
 * GPUs.
 */
export function ringBandwidth(network: Network, ranks: number): number {
  const nodes = nodesOf(network, ranks);
  if (nodes === 1) return network.nodeBandwidth;
  const fewest = Math.floor(ranks / nodes);
  const between = fewest * network.linkBandwidth;
  return fewest === 1 ? between : Math.min(network.nodeBandwidth, between);
}

/** Seconds of an all-reduce of `bytes`: the faster of ring and tree. */
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

/** Seconds of a reduce-scatter or an all-gather: half of a ring all-reduce. */
export function shardSeconds(network: Network, ranks: number, bytes: number): number {
  return ranks === 1 ? 0 : network.startLatency + passSeconds(network, ranks, bytes);
}

/** One pass around the ring: ranks - 1 hops, each with 1/ranks of the bytes. */
function passSeconds(network: Network, ranks: number, bytes: number): number {
  const between = nodesOf(network, ranks) - 1;
  const inside = ranks - 1 - between;
  const latency = inside * network.nodeLatency + between * network.linkLatency;
  return latency + (((ranks - 1) / ranks) * bytes) / ringBandwidth(network, ranks);
}

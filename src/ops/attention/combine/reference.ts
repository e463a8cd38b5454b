/** The gated sum of the branches in float64: out[t,head] = sum over b of gates[t,head,b] * branches[b][t,head]. */

/** One output [T,H,dv] for each of cmp, sel, win. */
export type Branches<T> = readonly [cmp: T, sel: T, win: T];

/** `gates` [T,H,3]. */
export function combineForward(gates: Float64Array, branches: Branches<Float64Array>): Float64Array {
  const out = new Float64Array(branches[0].length);
  const dv = (out.length * 3) / gates.length;
  for (let i = 0; i < out.length; i++)
    for (let b = 0; b < 3; b++) out[i] += gates[Math.floor(i / dv) * 3 + b] * branches[b][i];
  return out;
}

export function combineBackward(gates: Float64Array, branches: Branches<Float64Array>, dOut: Float64Array) {
  const dv = (dOut.length * 3) / gates.length;
  const dGates = new Float64Array(gates.length);
  const dBranches: Branches<Float64Array> = [
    new Float64Array(dOut.length),
    new Float64Array(dOut.length),
    new Float64Array(dOut.length),
  ];
  for (let i = 0; i < dOut.length; i++)
    for (let b = 0; b < 3; b++) {
      const gate = Math.floor(i / dv) * 3 + b;
      dGates[gate] += dOut[i] * branches[b][i];
      dBranches[b][i] = dOut[i] * gates[gate];
    }
  return { dGates, dBranches };
}

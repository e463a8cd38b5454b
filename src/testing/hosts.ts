/** Several hosts on one machine: network namespaces with names and addresses of their own, joined by a bridge. */
import { spawnSync } from 'node:child_process';
import { chmodSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

export interface Hosts {
  readonly names: readonly string[];
  /** Words for mpirun that start one rank on each of them. */
  readonly mpirunWords: readonly string[];
  remove(): void;
}

/** The program that mpirun calls instead of ssh; its words are the host, then the command. */
const AGENT = `#!/bin/bash
host=$1; shift
exec ip netns exec $host unshare --uts bash -c "hostname $host; $*"
`;

/** Two hosts, or the reason why this machine does not allow them. `folder` takes the agent's script. */
export function openHosts(folder: string): Hosts | string {
  if (process.getuid?.() !== 0) return 'network namespaces need root';
  const id = process.pid % 10_000;
  const names = [1, 2].map((i) => `tf${id}h${i}`);
  const [bridge, network] = [`tf${id}br`, `10.${100 + (id % 100)}.${Math.floor(id / 100) % 250}`];
  const remove = () => {
    for (const name of names) spawnSync('ip', ['netns', 'del', name]);
    spawnSync('ip', ['link', 'del', bridge]);
  };
  const commands = [
    `link add ${bridge} type bridge`,
    `addr add ${network}.254/24 dev ${bridge}`,
    `link set ${bridge} up`,
    ...names.flatMap((name, i) => [
      `netns add ${name}`,
      `link add tf${id}v${i} type veth peer name eth0 netns ${name}`,
      `link set tf${id}v${i} master ${bridge} up`,
      `-n ${name} addr add ${network}.${i + 1}/24 dev eth0`,
      `-n ${name} link set eth0 up`,
      `-n ${name} link set lo up`,
    ]),
  ];
  for (const command of commands) {
    const { status, error, stderr } = spawnSync('ip', command.split(' '), { encoding: 'utf8' });
    if (status === 0) continue;
    remove();
    return `ip ${command}: ${error?.message ?? stderr.trim()}`;
  }
  const agent = join(folder, 'agent.sh');
  writeFileSync(agent, AGENT);
  chmodSync(agent, 0o755);
  const interfaces = ['oob', 'btl'].flatMap((layer) => ['--mca', `${layer}_tcp_if_include`, `${network}.0/24`]);
  const where = ['-H', names.map((name) => `${name}:1`).join(), '-n', String(names.length)];
  return {
    names,
    remove,
    mpirunWords: ['--allow-run-as-root', '--mca', 'plm_rsh_agent', agent, ...interfaces, ...where],
  };
}

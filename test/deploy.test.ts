/**
 * The recipes of deploy/: scripts parse and call the launcher correctly, units verify, manifests have only fields that
 * Kubernetes has. Launchers themselves are not tested here; deploy/README.md lists what was tried.
 */
import { spawnSync } from 'node:child_process';
import { chmodSync, copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { parse } from 'yaml';
import { z } from 'zod';
import { parseTrainFlags } from '../src/cli/shared/train-flags.js';
import { shippedConfigs } from '../src/config/shipped.js';
import { IDLE_STATS } from '../src/infer/engine/interface.js';
import { Metrics } from '../src/serve/metrics.js';
import { temporaryFolder } from '../src/testing/run.js';

const deploy = join(import.meta.dirname, '..', 'deploy');
const text = (name: string) => readFileSync(join(deploy, name), 'utf8');
let folder: { path: string; remove: () => void };
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => folder.remove());

const has = (program: string) => spawnSync('sh', ['-c', `command -v ${program}`]).status === 0;
const SCRIPTS = ['torchrun.sh', 'mpirun.sh', 'slurm.sbatch', 'slurm-prepare.sbatch'];

describe.each(SCRIPTS)('%s', (name) => {
  it('is a valid bash script', () => {
    const { status, stderr } = spawnSync('bash', ['-n', join(deploy, name)], { encoding: 'utf8' });
    expect(stderr).toBe('');
    expect(status).toBe(0);
  });

  it('passes shellcheck', (context) => {
    if (!has('shellcheck')) return context.skip('shellcheck is not installed (Debian: apt-get install shellcheck)');
    const { stdout } = spawnSync('shellcheck', ['--shell=bash', join(deploy, name)], { encoding: 'utf8' });
    expect(stdout).toBe('');
  });
});

/** Runs a script with launchers that record their arguments and the secret instead of working. */
function launched(script: string, words: readonly string[], env: Record<string, string>, exit = 0) {
  const bin = join(folder.path, 'bin');
  mkdirSync(bin, { recursive: true });
  const log = join(folder.path, 'called');
  writeFileSync(log, '');
  const secret = join(folder.path, 'secret');
  writeFileSync(secret, '');
  for (const program of ['torchrun', 'mpirun', 'srun', 'scontrol', 'nvidia-smi']) {
    const isSrun = program === 'srun';
    const said =
      program === 'nvidia-smi'
        ? 'echo "GPU 0"; echo "GPU 1"'
        : `echo ${program} "$@" >> ${log}; echo "$TREFOIL_RUN_SECRET" > ${secret}`;
    writeFileSync(join(bin, program), `#!/bin/sh\n${said}\nexit ${isSrun ? exit : 0}\n`);
    chmodSync(join(bin, program), 0o755);
  }
  const result = spawnSync('bash', [join(deploy, script), ...words], {
    encoding: 'utf8',
    env: { PATH: `${bin}:${process.env['PATH']}`, ...env },
  });
  const calls = readFileSync(log, 'utf8').trim().split('\n');
  return { code: result.status, stderr: result.stderr, calls, secret: readFileSync(secret, 'utf8').trim() };
}

const trefoil = String.raw`node \S+/dist/cli/main\.js train`;

describe('what is launched', () => {
  it('torchrun on one machine: a process per GPU', () => {
    const { code, calls } = launched('torchrun.sh', ['--config', 'base'], {});
    expect(code).toBe(0);
    expect(calls).toEqual([
      expect.stringMatching(
        new RegExp(
          `^torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --max-restarts 3 --master-addr 127.0.0.1 --master-port 29500 --no-python ${trefoil} --resume auto --config base$`,
        ),
      ),
    ]);
  });

  it('torchrun on several machines: fails without the address of the first', () => {
    const env = { NNODES: '2', NODE_RANK: '1', NPROC_PER_NODE: '8' };
    expect(launched('torchrun.sh', [], env)).toMatchObject({ code: 1, calls: [''] });
    const { calls } = launched('torchrun.sh', [], { ...env, MASTER_ADDR: 'host-a', MASTER_PORT: '3000' });
    expect(calls[0]).toContain('--nnodes 2 --node-rank 1 --nproc-per-node 8');
    expect(calls[0]).toContain('--master-addr host-a --master-port 3000');
  });

  it('mpirun: the number of ranks, and variables for other machines', () => {
    expect(launched('mpirun.sh', [], {})).toMatchObject({ code: 1, calls: [''] });
    const here = launched('mpirun.sh', ['--steps', '3'], { RANKS: '2' });
    expect(here.calls[0]).toMatch(
      new RegExp(
        `^mpirun -n 2 --oversubscribe --bind-to none( --allow-run-as-root)? ${trefoil} --resume auto --steps 3$`,
      ),
    );
    const there = launched('mpirun.sh', [], {
      RANKS: '16',
      HOSTFILE: 'hosts',
      NSA_LR: '1e-3',
      CONFIG: 'base',
      OTHER: '1',
    });
    expect(there.calls[0]).toContain('-n 16 --hostfile hosts -x CONFIG -x TREFOIL_RUN_SECRET -x NSA_LR --bind-to none');
    expect(there.calls[0]).not.toContain('OTHER');
  });

  it('a secret of the run, new for every start, and the given one where there is one', () => {
    const slurm = { OUT_DIR: '/runs/mine', SLURM_SUBMIT_DIR: '/opt/trefoil', SLURM_JOB_ID: '77' };
    const starts = [
      ['torchrun.sh', {}],
      ['mpirun.sh', { RANKS: '2' }],
      ['slurm.sbatch', slurm],
    ] as const;
    const secrets = starts.flatMap(([script, env]) => [1, 2].map(() => launched(script, [], env).secret));
    for (const secret of secrets) expect(secret).toMatch(/^[0-9a-f]{64}$/);
    expect(new Set(secrets).size).toBe(secrets.length);
    expect(launched('torchrun.sh', [], { TREFOIL_RUN_SECRET: 'given' }).secret).toBe('given');
    expect(launched('mpirun.sh', [], { RANKS: '2', TREFOIL_RUN_SECRET: 'given' }).secret).toBe('given');
    // Each machine of several starts its own torchrun: a secret made here would differ.
    const several = { NNODES: '2', NPROC_PER_NODE: '8', MASTER_ADDR: 'host-a' };
    expect(launched('torchrun.sh', [], several)).toMatchObject({ code: 0, secret: '' });
  });

  it('Slurm: srun once; code 4 requeues, other codes are passed on', () => {
    const env = {
      OUT_DIR: '/runs/mine',
      SLURM_SUBMIT_DIR: '/opt/trefoil',
      SLURM_JOB_ID: '77',
      SLURM_CPUS_PER_TASK: '12',
    };
    const srun = expect.stringMatching(
      new RegExp(`^srun --kill-on-bad-exit=1 --cpus-per-task=12 ${trefoil} --out-dir /runs/mine --resume auto$`),
    );
    expect(launched('slurm.sbatch', [], env)).toMatchObject({ code: 0, calls: [srun] });
    expect(launched('slurm.sbatch', [], env, 4)).toMatchObject({ code: 0, calls: [srun, 'scontrol requeue 77'] });
    for (const code of [1, 2, 3, 5, 6])
      expect(launched('slurm.sbatch', [], env, code)).toMatchObject({ code, calls: [srun] });
    expect(launched('slurm.sbatch', [], { SLURM_SUBMIT_DIR: '/' }).code).not.toBe(0);
  });
});

it('hostfile.example has a machine and its slots on each line', () => {
  const lines = text('hostfile.example')
    .split('\n')
    .filter((line) => line !== '' && !line.startsWith('#'));
  expect(lines.length).toBeGreaterThan(1);
  for (const line of lines) expect(line).toMatch(/^[\w.-]+ slots=\d+$/);
});

describe.each(['slurm.sbatch', 'slurm-prepare.sbatch'])('%s', (script) => {
  /** Options of sbatch (Slurm 23.11) that the files use, and what their values look like. */
  const OPTIONS: Readonly<Record<string, RegExp | null>> = {
    'job-name': /^[\w-]+$/,
    array: /^\d+(-\d+)?(%\d+)?$/,
    nodes: /^\d+(-\d+)?$/,
    'ntasks-per-node': /^\d+$/,
    'gpus-per-node': /^([a-z]\w*:)?\d+$/,
    'cpus-per-task': /^\d+$/,
    mem: /^\d+[KMGT]?$/,
    time: /^(\d+-)?\d+:\d\d:\d\d$/,
    signal: /^([RB]+:)?[A-Z0-9]+(@\d+)?$/,
    requeue: null,
    'open-mode': /^(append|truncate)$/,
    output: /^[\w.%-]+$/,
  };

  it('has only known options of sbatch, before the first command', () => {
    const lines = text(script).split('\n');
    const options = lines.flatMap((line, at) => {
      const match = /^#SBATCH --([a-z-]+)(?:=(\S+))?$/.exec(line);
      if (line.startsWith('#SBATCH')) expect(match, line).not.toBeNull();
      return match ? [{ at, name: match[1], value: match[2] }] : [];
    });
    expect(options.length).toBeGreaterThan(7);
    for (const { name } of options) expect(Object.keys(OPTIONS)).toContain(name);
    for (const { name, value } of options) {
      const form = OPTIONS[name];
      if (form === null) expect(value, name).toBeUndefined();
      else expect(value, name).toMatch(form);
    }
    // sbatch ignores options after the first command.
    const command = lines.findIndex((line) => line !== '' && !line.startsWith('#'));
    expect(Math.max(...options.map(({ at }) => at))).toBeLessThan(command);
  });
});

describe('slurm-prepare.sbatch', () => {
  const env = { OUT_DIR: '/shared/shards', SLURM_SUBMIT_DIR: '/opt/trefoil', SLURM_CPUS_PER_TASK: '16' };
  const task = { ...env, SLURM_ARRAY_TASK_ID: '3', SLURM_ARRAY_TASK_COUNT: '8' };
  const words = ['--local-path', '/shared/corpus', '--tokenizer', 'gpt2'];

  it('prepares the part of its task with the given flags', () => {
    const { code, calls } = launched('slurm-prepare.sbatch', words, task);
    expect(code).toBe(0);
    expect(calls).toEqual([
      'srun --cpus-per-task=16 node /opt/trefoil/dist/cli/main.js data prepare --part 3/8 --out /shared/shards ' +
        '--workers 16 --local-path /shared/corpus --tokenizer gpt2',
    ]);
  });

  it('repeats single parts of the same division, fails without a folder, and passes a failure on', () => {
    expect(launched('slurm-prepare.sbatch', words, { ...task, PARTS: '64' }).calls[0]).toContain('--part 3/64');
    expect(launched('slurm-prepare.sbatch', words, { ...task, OUT_DIR: '' }).code).toBe(1);
    expect(launched('slurm-prepare.sbatch', words, task, 2).code).toBe(2);
  });
});

const quantity = z.union([z.number().int(), z.string().regex(/^\d+(\.\d+)?[A-Za-z]*$/)]);
const name = z.string().regex(/^[a-z0-9]([-a-z0-9]*[a-z0-9])?$/);
const metadata = z.strictObject({ name: name.optional(), labels: z.record(z.string(), z.string()).optional() });
const variable = z.union([
  z.strictObject({ name: z.string(), value: z.string() }),
  z.strictObject({
    name: z.string(),
    valueFrom: z.union([
      z.strictObject({ fieldRef: z.strictObject({ fieldPath: z.string() }) }),
      z.strictObject({ secretKeyRef: z.strictObject({ name, key: z.string(), optional: z.boolean().optional() }) }),
    ]),
  }),
]);
const resources = z.strictObject({
  limits: z.record(z.string(), quantity).optional(),
  requests: z.record(z.string(), quantity).optional(),
});
/** The used fields of core/v1 PodSpec and batch/v1 JobSpec (Kubernetes 1.31 and newer). */
const podSpec = z.strictObject({
  restartPolicy: z.literal('Never'), // podFailurePolicy asks for it
  terminationGracePeriodSeconds: z.number().int().positive(),
  containers: z
    .array(
      z.strictObject({
        name,
        image: z.string(),
        command: z.array(z.string()),
        args: z.array(z.string()).optional(),
        env: z.array(variable),
        resources: resources.optional(),
        volumeMounts: z.array(z.strictObject({ name, mountPath: z.string().startsWith('/') })),
      }),
    )
    .length(1),
  volumes: z.array(
    z.union([
      z.strictObject({ name, persistentVolumeClaim: z.strictObject({ claimName: name }) }),
      z.strictObject({ name, emptyDir: z.strictObject({ medium: z.enum(['', 'Memory']) }) }),
    ]),
  ),
});
const jobTemplate = z.strictObject({
  metadata: metadata.optional(),
  spec: z.strictObject({
    parallelism: z.number().int().positive().optional(),
    completions: z.number().int().positive().optional(),
    completionMode: z.literal('Indexed').optional(),
    backoffLimit: z.number().int().min(0),
    podFailurePolicy: z.strictObject({
      rules: z.array(
        z.strictObject({
          action: z.enum(['FailJob', 'Ignore', 'Count', 'FailIndex']),
          onExitCodes: z.strictObject({
            containerName: name,
            operator: z.enum(['In', 'NotIn']),
            values: z.array(z.number().int().positive()),
          }),
        }),
      ),
    }),
    template: z.strictObject({ metadata: metadata.optional(), spec: podSpec }),
  }),
});
/** jobset.x-k8s.io/v1alpha2 as of JobSet 0.12.0. */
const jobSetSpec = z.strictObject({
  network: z.strictObject({
    enableDNSHostnames: z.boolean().optional(),
    publishNotReadyAddresses: z.boolean().optional(),
    subdomain: name.optional(),
  }),
  failurePolicy: z.strictObject({
    maxRestarts: z.number().int().min(0),
    rules: z.array(
      z.strictObject({
        name,
        action: z.enum(['FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts']),
        onJobFailureReasons: z.array(z.enum(['BackoffLimitExceeded', 'DeadlineExceeded', 'PodFailurePolicy'])),
      }),
    ),
  }),
  replicatedJobs: z
    .array(z.strictObject({ name, replicas: z.number().int().min(0).optional(), template: jobTemplate }))
    .length(1),
});
const labels = z.record(z.string(), z.string());
const probe = z.strictObject({
  httpGet: z.strictObject({ path: z.literal('/health'), port: z.literal('http') }),
  periodSeconds: z.number().int().positive().optional(),
  failureThreshold: z.number().int().positive().optional(),
});
/** The used fields of apps/v1 DeploymentSpec. */
const deploymentSpec = z.strictObject({
  replicas: z.number().int().positive(),
  selector: z.strictObject({ matchLabels: labels }),
  template: z.strictObject({
    metadata: z.strictObject({ labels }),
    spec: z.strictObject({
      terminationGracePeriodSeconds: z.number().int().positive(),
      containers: z
        .array(
          z.strictObject({
            name,
            image: z.string(),
            args: z.array(z.string()),
            resources,
            ports: z.array(z.strictObject({ name, containerPort: z.number().int() })),
            startupProbe: probe,
            readinessProbe: probe,
            livenessProbe: probe,
            volumeMounts: z.array(
              z.strictObject({ name, mountPath: z.string().startsWith('/'), readOnly: z.literal(true) }),
            ),
          }),
        )
        .length(1),
      volumes: z.array(
        z.union([
          z.strictObject({ name, persistentVolumeClaim: z.strictObject({ claimName: name }) }),
          z.strictObject({ name, secret: z.strictObject({ secretName: name }) }),
        ]),
      ),
    }),
  }),
});
const SCHEMAS: Readonly<Record<string, z.ZodType>> = {
  'prepare-job.yaml': z.strictObject({
    apiVersion: z.literal('batch/v1'),
    kind: z.literal('Job'),
    metadata,
    spec: z.strictObject({
      ...jobTemplate.shape.spec.omit({ backoffLimit: true }).shape,
      backoffLimitPerIndex: z.number().int().min(0),
      maxFailedIndexes: z.number().int().min(0),
    }),
  }),
  'serve.yaml': z.strictObject({
    apiVersion: z.literal('apps/v1'),
    kind: z.literal('Deployment'),
    metadata,
    spec: deploymentSpec,
  }),
  'serve-service.yaml': z.strictObject({
    apiVersion: z.literal('v1'),
    kind: z.literal('Service'),
    metadata,
    spec: z.strictObject({
      selector: labels,
      ports: z.array(z.strictObject({ name, port: z.number().int(), targetPort: name })),
    }),
  }),
  'jobset.yaml': z.strictObject({
    apiVersion: z.literal('jobset.x-k8s.io/v1alpha2'),
    kind: z.literal('JobSet'),
    metadata,
    spec: jobSetSpec,
  }),
  // trainer.kubeflow.org/v1alpha1 as of Kubeflow Trainer 2.3.0
  'kubeflow-runtime.yaml': z.strictObject({
    apiVersion: z.literal('trainer.kubeflow.org/v1alpha1'),
    kind: z.literal('TrainingRuntime'),
    metadata,
    spec: z.strictObject({
      mlPolicy: z.strictObject({ numNodes: z.number().int().positive(), torch: z.strictObject({}) }),
      template: z.strictObject({ spec: jobSetSpec }),
    }),
  }),
  'kubeflow-trainjob.yaml': z.strictObject({
    apiVersion: z.literal('trainer.kubeflow.org/v1alpha1'),
    kind: z.literal('TrainJob'),
    metadata,
    spec: z.strictObject({
      runtimeRef: z.strictObject({
        apiGroup: z.string(),
        kind: z.enum(['TrainingRuntime', 'ClusterTrainingRuntime']),
        name,
      }),
      trainer: z.strictObject({
        numNodes: z.number().int().positive(),
        numProcPerNode: z.number().int().positive(),
        args: z.array(z.string()),
        env: z.array(variable),
        resourcesPerNode: resources,
      }),
    }),
  }),
};

// biome-ignore lint/suspicious/noExplicitAny: validated by the schemas above
const manifest = (file: string): any => parse(text(join('kubernetes', file)));

describe('manifests', () => {
  it('are all checked', () => {
    expect(readdirSync(join(deploy, 'kubernetes')).sort()).toEqual(Object.keys(SCHEMAS).sort());
  });

  it.each(Object.keys(SCHEMAS))('%s has only known fields of the right types', (file) => {
    expect(SCHEMAS[file].safeParse(manifest(file)).error?.issues).toBeUndefined();
    const wrong = { ...manifest(file), spec: { ...manifest(file).spec, sped: 1 } };
    expect(SCHEMAS[file].safeParse(wrong).success).toBe(false);
  });

  const jobOf = (spec: z.infer<typeof jobSetSpec>) => {
    const { template } = spec.replicatedJobs[0];
    return {
      job: template.spec,
      container: template.spec.template.spec.containers[0],
      pod: template.spec.template.spec,
    };
  };
  const jobs = [
    ['jobset.yaml', (file: string) => jobOf(manifest(file).spec)],
    ['kubeflow-runtime.yaml', (file: string) => jobOf(manifest(file).spec.template.spec)],
  ] as const;

  it.each(jobs)('%s: mounts have volumes, and exit codes refer to this container', (file, read) => {
    const { job, container, pod } = read(file);
    const volumes = pod.volumes.map((volume) => volume.name);
    expect(container.volumeMounts.map((mount) => mount.name).sort()).toEqual(volumes.sort());
    for (const { onExitCodes } of job.podFailurePolicy.rules) expect(onExitCodes.containerName).toBe(container.name);
    expect(container.command.slice(-3)).toEqual(['launch', '--', 'train']);
  });

  it('jobset.yaml: pods, GPUs and the first address agree with PET_*', () => {
    const { metadata: named, spec } = manifest('jobset.yaml');
    const { job, container } = jobOf(spec);
    const values = new Map(container.env.map((one) => [one.name, 'value' in one ? one.value : one.valueFrom]));
    expect(Number(values.get('PET_NNODES'))).toBe(job.parallelism);
    expect(job.completions).toBe(job.parallelism);
    expect(Number(values.get('PET_NPROC_PER_NODE'))).toBe(container.resources?.limits?.['nvidia.com/gpu']);
    const { name: replicated } = spec.replicatedJobs[0];
    expect(values.get('PET_MASTER_ADDR')).toBe(`${named.name}-${replicated}-0-0.${named.name}`);
  });

  it('prepare-job.yaml: the command that its shell runs prepares the part of the index', () => {
    const { spec } = manifest('prepare-job.yaml');
    const [container] = spec.template.spec.containers;
    const values = new Map<string, string>(
      container.env.map((one: { name: string; value?: string }) => [one.name, one.value]),
    );
    expect(Number(values.get('PARTS'))).toBe(spec.completions);
    expect(spec.podFailurePolicy.rules[0].onExitCodes.containerName).toBe(container.name);
    const names = (all: { name: string }[]) => all.map((one) => one.name);
    expect(names(container.volumeMounts)).toEqual(names(spec.template.spec.volumes));
    const bin = join(folder.path, 'node-bin');
    mkdirSync(bin, { recursive: true });
    writeFileSync(join(bin, 'node'), '#!/bin/sh\necho "$@"\n');
    chmodSync(join(bin, 'node'), 0o755);
    const [program, ...words] = [...container.command, ...container.args];
    const { stdout } = spawnSync(program, words, {
      encoding: 'utf8',
      env: { PATH: `${bin}:${process.env['PATH']}`, INDEX: '7', PARTS: '8' },
    });
    expect(stdout.trim()).toBe(
      '/opt/trefoil/dist/cli/main.js data prepare --part 8/8 --out=/runs/shards --local-path=/runs/corpus ' +
        '--tokenizer=gpt2 --workers=16',
    );
  });

  it('the server: mounts have volumes, the Service selects its pods', () => {
    const { template, selector } = manifest('serve.yaml').spec;
    const [container] = template.spec.containers;
    const names = (all: { name: string }[]) => all.map((one) => one.name).sort();
    expect(names(container.volumeMounts)).toEqual(names(template.spec.volumes));
    expect(template.metadata.labels).toEqual(selector.matchLabels);
    expect(manifest('serve-service.yaml').spec.selector).toEqual(selector.matchLabels);
  });

  it('Kubeflow: the job refers to the runtime, whose names are those Kubeflow requires', () => {
    const [runtime, job] = [manifest('kubeflow-runtime.yaml'), manifest('kubeflow-trainjob.yaml')];
    expect(job.spec.runtimeRef).toMatchObject({ kind: runtime.kind, name: runtime.metadata.name });
    expect(job.spec.trainer.numProcPerNode).toBe(job.spec.trainer.resourcesPerNode.limits['nvidia.com/gpu']);
    const [replicated] = runtime.spec.template.spec.replicatedJobs;
    expect([replicated.name, jobOf(runtime.spec.template.spec).container.name]).toEqual(['node', 'node']);
    expect(replicated.template.metadata.labels['trainer.kubeflow.org/trainjob-ancestor-step']).toBe('trainer');
    // Kubeflow refuses a job that sets these itself.
    for (const { name: own } of job.spec.trainer.env) expect(own).not.toMatch(/^PET_/);
  });

  it.each([
    ['jobset.yaml', (file: string) => jobOf(manifest(file).spec).container.args!],
    ['kubeflow-trainjob.yaml', (file: string) => manifest(file).spec.trainer.args as string[]],
  ] as const)('%s: its arguments are flags of train', (file, read) => {
    const words = read(file);
    const { config, resume } = parseTrainFlags(words);
    expect(shippedConfigs()).toContain(config);
    expect(resume).toBe('auto');
  });
});

it('grafana-serve.json shows metrics that the server has', () => {
  const names = [...text('grafana-serve.json').matchAll(/trefoil:([a-z0-9_]+)/g)].map((match) => match[1]);
  const metrics = new Metrics().text(IDLE_STATS);
  expect(names.length).toBeGreaterThan(10);
  for (const metric of names) expect(metrics, metric).toMatch(new RegExp(`^trefoil:${metric}[ {]`, 'm'));
});

describe('systemd', () => {
  const units = readdirSync(join(deploy, 'systemd')).filter((file) => file.startsWith('trefoil-'));

  it('verifies every unit', (context) => {
    if (!has('systemd-analyze'))
      return context.skip('systemd-analyze is not installed (Debian: apt-get install systemd)');
    const place = join(folder.path, 'units');
    mkdirSync(place, { recursive: true });
    // Templates are verified as instances, beside the templates they refer to.
    const instances = units.map((file) => {
      copyFileSync(join(deploy, 'systemd', file), join(place, file));
      const instance = join(place, file.replace('@.', '@mine.'));
      copyFileSync(join(deploy, 'systemd', file), instance);
      return instance;
    });
    const verify = (...files: string[]) => spawnSync('systemd-analyze', ['verify', ...files], { encoding: 'utf8' });
    const { status, stdout, stderr } = verify(...instances);
    expect(stdout + stderr).toBe('');
    expect(status).toBe(0);
    const broken = join(place, 'broken@mine.service');
    writeFileSync(broken, text('systemd/trefoil-health@.service').replace('[Service]', '[Service]\nRestartt=no'));
    expect(verify(broken).stderr).toContain('Restartt');
  });

  it('the exit codes of the trainer decide what is started again', () => {
    const unit = text('systemd/trefoil-train@.service');
    expect(unit).toMatch(/^SuccessExitStatus=3 4$/m);
    expect(unit).toMatch(/^RestartPreventExitStatus=2 3 4 5$/m);
  });

  it('example.env names a shipped config', () => {
    expect(shippedConfigs()).toContain(/^CONFIG=(.+)$/m.exec(text('systemd/example.env'))?.[1]);
  });
});

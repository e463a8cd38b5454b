// Training steps on a GPU. Models compute in bf16 there, with fp32 parameters, unless asked otherwise. Without a usable
// GPU the program prints the reason and ends.
import {
  AdamW,
  cudaAbsence,
  LanguageModel,
  modelShape,
  openDevice,
  parseConfig,
  Sequences,
  sparseLayout,
  Tensor,
  withTape,
} from 'trefoil';

const absence = cudaAbsence();
if (absence !== null) {
  console.log(`this example needs an NVIDIA GPU: ${absence}`);
} else {
  const device = openDevice('cuda');
  const config = parseConfig(); // the 125m shape
  const model = new LanguageModel(device, modelShape(config, 50_257), 1);
  console.log(`${device.name}: ${model.parameterCount} parameters, activations in ${model.dtype}`);
  const optimizer = new AdamW(
    device,
    model.parameters.map((parameter) => ({ parameter, weightDecay: 0.01 })),
  );
  const length = 8192;
  const sequences = new Sequences(device, [length]);
  const layout = sparseLayout(sequences, config.nsa);
  const ids = Tensor.from(
    device,
    Array.from({ length }, (_, i) => (i * i) % 50_257),
    [length],
    'i32',
  );
  for (let step = 1; step <= 10; step++) {
    const start = performance.now();
    const loss = withTape(device, (tape) => {
      const output = model.loss(tape, ids, ids, { layout, checkpointing: false });
      tape.backward(output);
      return output.item();
    });
    optimizer.step({ learningRate: 1e-4 });
    device.synchronize(); // kernels run asynchronously
    const ms = performance.now() - start;
    console.log(
      `step ${step}: loss ${loss.toFixed(3)}, ${ms.toFixed(1)} ms, ${Math.round((length / ms) * 1000)} tokens/s`,
    );
  }
  for (const held of [ids, layout, sequences, optimizer, model]) held.free();
}

// Training steps on a GPU. Models compute in bf16 there, with fp32 parameters, unless asked otherwise. Without a usable
// GPU the program prints the reason and ends.
import { openDevice, parseConfig } from 'trefoil';
import { cudaAbsence } from 'trefoil/device';
import { AdamW, LanguageModel, modelShape, Tape, Tensor } from 'trefoil/nn';

const absence = cudaAbsence();
if (absence !== null) {
  console.log(`this example needs an NVIDIA GPU: ${absence}`);
} else {
  const device = openDevice('cuda');
  const config = parseConfig({}); // every default: the 125m shape
  using model = new LanguageModel(device, modelShape(config, 50_257), 1);
  console.log(`${device.name}: ${model.parameterCount} parameters, activations in ${model.dtype}`);
  using optimizer = new AdamW(
    device,
    model.parameters.map((parameter) => ({ parameter, weightDecay: 0.01 })),
  );
  const length = 8192;
  using ids = Tensor.from(
    device,
    Array.from({ length }, (_, i) => (i * i) % 50_257),
    [length],
    'i32',
  );
  for (let step = 1; step <= 10; step++) {
    const start = performance.now();
    using tape = new Tape(device);
    const loss = model.loss(tape, ids, ids, { lengths: [length], checkpointing: false });
    tape.backward(loss);
    optimizer.step({ learningRate: 1e-4 });
    device.synchronize(); // kernels run asynchronously
    const ms = performance.now() - start;
    console.log(
      `step ${step}: loss ${loss.item().toFixed(3)}, ${ms.toFixed(1)} ms, ${Math.round((length / ms) * 1000)} tokens/s`,
    );
  }
}

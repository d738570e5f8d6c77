// As step.c, in JavaScript: timers, promises, the thread pool's file system calls, and a worker.
const { randomBytes } = require("crypto");
const fs = require("fs");
const { Worker } = require("worker_threads");

const steps = Number(process.argv[1]);
const nonce = randomBytes(8).readBigUInt64LE();
let value = nonce;
let sum = 0;
const hex = (number) => number.toString(16).padStart(16, "0");
const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));
const worker = new Worker(
  `const { parentPort } = require("worker_threads");
   parentPort.on("message", (value) => parentPort.postMessage(BigInt.asUintN(64, value * 6364136223846793005n + 1n)));`,
  { eval: true },
);
const next = (value) => new Promise((resolve) => {
  worker.once("message", resolve);
  worker.postMessage(value);
});

(async () => {
  for (let step = 1; step <= steps; step++) {
    sum += 1 / step;
    value = await next(value);
    await fs.promises.stat("/");
    fs.writeSync(1, `${hex(nonce)} ${step} ${sum} ${hex(value)}\n`);
    await sleep(2);
  }
  process.exit(7);
})();

"""node: timers, promises, a worker thread, lines on standard input, and a file watcher."""

from heartbeat import child, keep, scratch, talk

SCRIPT = """
const { Worker } = require('worker_threads'), fs = require('fs');
let ticks = 0, echoes = 0;
setInterval(() => { ticks++ }, 10);
const worker = new Worker("const { parentPort } = require('worker_threads');" +
  "parentPort.on('message', m => parentPort.postMessage(m + 1))", { eval: true });
worker.on('message', m => { echoes = m; setTimeout(() => worker.postMessage(m), 20) });
worker.postMessage(1);
let seen = '';
fs.writeFileSync('watched', '');
fs.watch('watched', () => { try { seen = fs.readFileSync('watched', 'utf8') } catch (e) {} });
require('readline').createInterface({ input: process.stdin }).on('line', async line => {
  const before = [ticks, echoes];
  fs.writeFileSync('watched', line);
  while (ticks <= before[0] || echoes <= before[1] || seen != line)
    await new Promise(done => setTimeout(done, 5));
  console.log('r' + line);
});
"""
scratch()
node = child("node", "-e", SCRIPT)
keep(lambda n: talk(node, b"%d" % n) == b"r%d" % n)

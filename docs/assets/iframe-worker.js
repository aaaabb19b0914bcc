// A browser starts no Worker from a disk (file:). There, run the search's script in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          if (this.onmessage) this.onmessage(event);
          this.dispatchEvent(event);
        };
        inside.importScripts = (...scripts) => Promise.all(scripts.map((script) => load(inside, script)));
        load(inside, url).then(() => resolve(inside));
      });
      this.frame = frame;
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(url));
      inside.document.head.appendChild(script);
    });
}

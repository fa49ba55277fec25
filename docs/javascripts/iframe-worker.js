// Search of pages opened from the disk: browsers start no worker for file://, so that its script runs in a hidden frame.
// The idea is that of iframe-worker by Martin Donath, which the theme would load from a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.postMessage = (data) => {
        this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      };
      this.inside.document.write("<body></body>");
      this.inside.document.close();
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      this.inside.document.body.append(script);
    }
    async postMessage(data) {
      await this.loaded;
      this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    }
  };
}

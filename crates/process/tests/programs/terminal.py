# tmux with a client on one terminal and vim in a window of its own; a vim on another terminal. What is typed at each step
# must be seen on the screens, and at the end in the files.
import fcntl, pty, struct, subprocess, termios, threading

os.environ.update(TERM="xterm", TMUX_TMPDIR=folder, HOME=folder, LC_ALL="C.UTF-8", SHELL="/bin/sh")


class Screen:
    def __init__(self, *command):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execvp(command[0], command)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        self.seen = b""
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            try:
                self.seen = (self.seen + os.read(self.master, 65536))[-200000:]
            except OSError:
                return

    def type(self, text):
        os.write(self.master, text.encode())

    def shows(self, text):
        wait_for(f"{text} on the screen", lambda: text.encode() in self.seen)


def in_file(name, text):
    def holds():
        try:
            return text in open(f"{folder}/{name}").read()
        except FileNotFoundError:
            return False

    wait_for(f"{text} in {name}", holds)


steps = Steps()
vim = Screen("vim", "-u", "NONE", "-N", f"{folder}/alone")
vim.shows("alone")
tmux = Screen("tmux", "-f", "/dev/null", "new-session", f"vim -u NONE -N {folder}/inside")
tmux.shows("inside")
for step, value in steps:
    if step % 5 == 0:
        word = f"{value:016x}"
        for screen, name in [(vim, "alone"), (tmux, "inside")]:
            screen.type(f"o{word}\x1b")
            screen.shows(word)
            # Not under its own name: vim asks what to do about a file that was written after the checkpoint.
            screen.type(f":w! {folder}/{name}.out\r")
            in_file(f"{name}.out", word)
lines = steps.count // 5
for screen, name in [(vim, "alone"), (tmux, "inside")]:
    screen.type(":q!\r")
    require(os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1]) == 0, "another status")
    require(len(open(f"{folder}/{name}.out").read().split()) == lines, "another number of lines")
os._exit(7)

//! Real sshd on hosts of a cluster, for a key of the test's own, and ssh as a user has it who may
//! enter them.

use crate::cluster::Cluster;
use crate::host;
use crate::job::{User, family, send};
use kedge_left_out::left_out;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const SSHD: &str = "/usr/sbin/sshd";
/// How long an sshd may take to listen.
const SOON: Duration = Duration::from_secs(10);

/// Servers that run for as long as this lives.
#[derive(Debug)]
pub struct Remote {
    servers: Vec<Child>,
    /// Where ssh is found.
    path: String,
    /// What gives the servers' user a shell, if he has none.
    shell: Option<PathBuf>,
}

impl Remote {
    /// Lets the test in on `hosts`; `None` where there is no OpenSSH, which is counted.
    pub fn new(name: &str, cluster: &Cluster, hosts: &[usize]) -> Option<Remote> {
        if let Some(missing) = [SSHD, "/usr/bin/ssh"].iter().find(|path| !Path::new(path).exists())
        {
            left_out(name, &format!("no {missing}: scripts/setup --tests"));
            return None;
        }
        let home = cluster.world.home();
        let at = home.display();
        for key in ["host", "key"] {
            let mut make = Command::new("ssh-keygen");
            make.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(home.join(key));
            assert!(make.status().expect("ssh-keygen").success());
        }
        let shell = (cluster.user != User::Same).then(|| {
            let user = Some(cluster.user.id());
            chown(home.join("key"), user, user).expect("root");
            host("shell_of.c", "shell_of.so", &["-shared", "-fPIC"])
        });
        // What a user's own configuration says is not the test's to write.
        let system = home.join("system");
        fs::create_dir(&system).expect("a folder");
        let ssh = format!(
            "#!/bin/sh\nexec /usr/bin/ssh -F /dev/null -i {at}/key -o BatchMode=yes \
             -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \"$@\"\n"
        );
        fs::write(system.join("ssh"), ssh).expect("a file");
        fs::set_permissions(system.join("ssh"), PermissionsExt::from_mode(0o755)).expect("mine");
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin:/usr/sbin", system.display());
        let mut remote = Remote { servers: Vec::new(), path, shell };
        // Where the distribution's service makes it.
        fs::create_dir_all("/run/sshd").expect("a folder");
        hosts.iter().for_each(|host| remote.serve(cluster, *host));
        Some(remote)
    }

    fn serve(&mut self, cluster: &Cluster, host: usize) {
        let home = cluster.world.home();
        let at = home.display();
        // The first that is set counts for sshd, the last one here.
        let own = cluster.variables(host).into_iter().rev();
        let own = own.filter(|(name, _)| name.starts_with("XDG_") || name == "KEDGE_CONFIG");
        let set: Vec<String> = own.map(|(name, value)| format!("{name}={value}")).collect();
        let config = format!(
            "HostKey {at}/host\nAuthorizedKeysFile {at}/key.pub\nStrictModes no\nUsePAM no\n\
             PidFile none\nMaxStartups 100\nSetEnv PATH={} {}\n",
            self.path,
            set.join(" ")
        );
        let file = home.join(format!("sshd{host}"));
        fs::write(&file, config).expect("a file");
        let mut sshd = cluster.hosts[host].inside();
        sshd.args([SSHD, "-D", "-e", "-f"]).arg(&file);
        if let Some(shell) = &self.shell {
            sshd.env("LD_PRELOAD", shell);
        }
        sshd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.servers.push(sshd.spawn().expect("nsenter"));
        let listens = || {
            let mut look = cluster.hosts[host].inside();
            look.args(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/22"]).stderr(Stdio::null());
            look.status().is_ok_and(|status| status.success())
        };
        let begin = Instant::now();
        while !listens() {
            assert!(begin.elapsed() < SOON, "sshd does not listen on host {host}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The PATH of who may enter the hosts.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        for server in &mut self.servers {
            send("KILL", &family(server.id()));
            let _ = server.wait();
        }
    }
}

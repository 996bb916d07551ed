/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * hooks.h - tier A, Linux 5.17 to 6.12: which inodes are the processes of a sandbox about to change?
 *
 * These kernels have no tracepoint for change times. Nearly every change asks the security modules first, whether there are
 * any or not, and fentry sees them being asked. So an event comes *before* the change and also if that fails then; what it
 * came to is found out by comparison in either case. It is never lost to a freeze: a task is frozen only on its way back
 * to user space, when the change that was announced is done.
 *
 * Chosen are functions whose leading arguments are the same in all these releases; a program reads no argument that is not.
 *
 *   function                        what passes it                                          arguments that are read
 *   security_file_permission        write, sendfile, splice, copy_file_range, clone,        file, mask
 *                                   fallocate, io_submit, io_uring, also to pipes
 *   notify_change                   chmod, chown, utime, truncate, O_TRUNC                  -, dentry   (since 5.12)
 *   security_inode_init_security    every new inode of btrfs, ext4, xfs, tmpfs, with its    inode, folder
 *                                   number; also whiteouts of a rename and O_TMPFILE
 *   security_inode_create, mkdir,   new names: the folder, for file systems that do not     folder
 *   symlink, mknod                  pass the one above
 *   security_inode_link             second names, and the name of an O_TMPFILE              dentry, folder
 *   security_inode_unlink, rmdir    removed names                                           folder, dentry
 *   security_inode_rename           both names and folders                                  folder, dentry, folder, dentry
 *   security_inode_setxattr,        extended attributes; until 6.1 also access lists        -, dentry   (since 5.12)
 *   removexattr
 *   security_inode_set_acl,         access lists                                            -, dentry   (since 6.2)
 *   remove_acl
 *   vfs_fileattr_set                chattr, project ids                                     -, dentry   (since 5.13)
 *   security_mmap_file              a shared mapping of a file that is open for writing     file, -, flags
 *   file_update_time                the first store into a page of such a mapping           file
 *
 * A store into a page that is writable already is no event, as in tier B.
 */
#ifndef CRAB_HOOKS_H
#define CRAB_HOOKS_H

#include "memory.h"
#include "tasks.h"
#include "signals.h"

#define MAY_WRITE 2
#define MAY_APPEND 8
#define MAP_TYPE 0xf
#define MAP_SHARED 1
#define MAP_SHARED_VALIDATE 3
#define FMODE_WRITE 2
#define S_IFREG 0100000

/*
 * A file of overlayfs stands for one in a layer below. Not every way of writing asks about that one as well (splice no
 * longer does since 6.8, mmap never did). Until 6.12 it is what private_data of a regular file points at.
 */
static __always_inline int note_file(struct file *file, __u32 flags)
{
	struct inode *inode = file->f_inode;
	struct found found = {};
	struct file *real;
	__u32 *slot;

	if (inode->i_sb->s_magic != OVERLAYFS)
		return note_inode(inode, flags);
	if ((inode->i_mode & S_IFMT) != S_IFREG)
		return 0;
	slot = current_slot();
	if (!slot)
		return 0;
	real = file->private_data;
	probe_inode(&found, BPF_CORE_READ(real, f_inode));
	return note_found(*slot, &found, flags);
}

static __always_inline int note_dentry(struct dentry *dentry, __u32 flags)
{
	struct inode *inode = dentry->d_inode;

	return inode ? note_inode(inode, flags) : 0;
}

/* ---- content */

SEC("fentry/security_file_permission")
int BPF_PROG(file_permission, struct file *file, int mask)
{
	return mask & (MAY_WRITE | MAY_APPEND) ? note_file(file, DATA) : 0;
}

SEC("fentry/security_mmap_file")
int BPF_PROG(mmap_file, struct file *file, unsigned long protection, unsigned long flags)
{
	unsigned long type = flags & MAP_TYPE;

	if (!file || (type != MAP_SHARED && type != MAP_SHARED_VALIDATE) || !(file->f_mode & FMODE_WRITE))
		return 0;
	return note_file(file, DATA);
}

SEC("fentry/file_update_time")
int BPF_PROG(update_time, struct file *file)
{
	return note_file(file, DATA);
}

/* ---- names */

SEC("fentry/security_inode_init_security")
int BPF_PROG(init_security, struct inode *inode, struct inode *folder)
{
	note_inode(folder, CTIME);
	return note_inode(inode, CTIME | CREATED);
}

#define NEW_NAME(kind)                                        \
	SEC("fentry/security_inode_" #kind)                   \
	int BPF_PROG(new_##kind, struct inode *folder)        \
	{                                                     \
		return note_inode(folder, CTIME);             \
	}

NEW_NAME(create)
NEW_NAME(mkdir)
NEW_NAME(symlink)
NEW_NAME(mknod)

SEC("fentry/security_inode_link")
int BPF_PROG(new_link, struct dentry *known, struct inode *folder)
{
	note_inode(folder, CTIME);
	return note_dentry(known, CTIME);
}

SEC("fentry/security_inode_unlink")
int BPF_PROG(no_name, struct inode *folder, struct dentry *dentry)
{
	note_inode(folder, CTIME);
	return note_dentry(dentry, CTIME);
}

SEC("fentry/security_inode_rmdir")
int BPF_PROG(no_folder, struct inode *folder, struct dentry *dentry)
{
	note_inode(folder, CTIME);
	return note_dentry(dentry, CTIME);
}

SEC("fentry/security_inode_rename")
int BPF_PROG(other_name, struct inode *from, struct dentry *dentry, struct inode *to, struct dentry *replaced)
{
	note_inode(from, CTIME);
	note_inode(to, CTIME);
	note_dentry(dentry, CTIME);
	return note_dentry(replaced, CTIME);
}

/* ---- attributes: what comes first is a user namespace until 6.2, then an idmap */

#define ATTRIBUTE(name, function)                             \
	SEC("fentry/" #function)                              \
	int BPF_PROG(name, void *map, struct dentry *dentry)  \
	{                                                     \
		return note_dentry(dentry, CTIME);            \
	}

ATTRIBUTE(set_attributes, notify_change)
ATTRIBUTE(set_xattr, security_inode_setxattr)
ATTRIBUTE(remove_xattr, security_inode_removexattr)
ATTRIBUTE(set_flags, vfs_fileattr_set)
#ifdef ACCESS_LISTS
ATTRIBUTE(set_acl, security_inode_set_acl)
ATTRIBUTE(remove_acl, security_inode_remove_acl)
#endif

#endif
